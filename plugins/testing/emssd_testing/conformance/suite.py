"""The common base of all suites: the plugin under test, its options, and the number of examples."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # it ships no types

from emssd.cli.config import structured
from emssd.errors import ConfigError
from emssd.hooks.hookspecs import Spec
from emssd.hooks.registry import Registry
from emssd_testing.conformance.rules import broken, named

__all__ = ["Suite", "from_text", "made"]

_T = TypeVar("_T")


class Suite:
    """Tests of one plugin; inherit one of the kinds.

    Attributes:
        plugin: name of an installed plugin, as in ``drafter=NAME``. Without it, override what makes the thing to test.
        options: by field, what differs from the defaults of the plugin's config; numbers, texts and lists as in YAML.
        config: the config dataclass, where no `plugin` is named. Without one the tests of options are left out.
        models: architectures of the tiny targets, keys of `emssd_testing.models.ARCHITECTURES`; or folders of targets,
            for a drafter that was trained for one. The option ``--emssd-models`` of pytest comes before it.
        num_examples: how many examples Hypothesis draws for each test; each test has a default. The pytest option
            ``--emssd-examples`` overrides it.
        derandomize: whether Hypothesis draws the same examples in every run.
        shrinks: whether Hypothesis looks for a small example of a broken rule, which may take minutes.
        cost: what the test of the cost measured.
    """

    kind: ClassVar[str]
    plugin: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    config: ClassVar[type | None] = None
    models: ClassVar[tuple[str, ...]] = ("llama", "opt")
    num_examples: ClassVar[int | None] = None
    derandomize: ClassVar[bool] = False
    shrinks: ClassVar[bool] = True
    cost: str = ""

    @classmethod
    def rules_by_test(cls) -> dict[str, list[str]]:
        """By test the rules that it holds the plugin to."""
        marks = {name: getattr(getattr(cls, name), "pytestmark", ()) for name in dir(cls) if name.startswith("test_")}
        return {
            test: [word if "." in word else f"{cls.kind}.{word}" for mark in mine for word in mark.args]
            for test, mine in marks.items()
        }

    @pytest.fixture(autouse=True)
    def _options_of_pytest(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Take over ``--emssd-examples`` and ``--emssd-models``, and report the cost."""
        if examples := request.config.getoption("emssd_examples", None):
            self.num_examples = examples  # type: ignore[misc]  # of this test only
        if models := request.config.getoption("emssd_models", None):
            self.models = tuple(models.split(","))  # type: ignore[misc]  # as above
        yield
        if self.cost:
            request.node.user_properties.append(("emssd_cost", self.cost))

    def make_config(self) -> Any:
        config = self._config()
        assert config is not None, "name the plugin, or its config"
        with named(f"{self.kind}.options", f"{config.__name__} with the options {dict(self.options)}"):
            return made(config, self.options)

    def spec(self) -> Spec:
        """The offer of the installed plugin. Raises PluginError: it is not installed, or cannot run here."""
        if self.plugin is None:
            makes = {"drafter": "make_drafter", "backend": "make_backend", "budget": "make_policy"}
            raise NotImplementedError(f"{type(self).__name__} must name its plugin, or override {makes[self.kind]}")
        return _registry(f"{type(self).__module__}.{type(self).__qualname__}").find(self.kind, self.plugin)

    @pytest.mark.emssd_rule("pickle")
    def test_config_survives_pickling(self) -> None:
        """Configs travel to other processes and into files of results."""
        config = self._config_or_skip()
        self._survives(config, "pickle", lambda value: pickle.loads(pickle.dumps(value)), f"{self.kind}.pickle")
        self._survives(config, "copy.copy", copy.copy, f"{self.kind}.pickle")
        self._survives(config, "copy.deepcopy", copy.deepcopy, f"{self.kind}.pickle")

    @pytest.mark.emssd_rule("options")
    def test_config_survives_the_command_line(self) -> None:
        """Hydra holds the options as a structured config and writes them as YAML."""
        config = self._config_or_skip()
        if not (isinstance(config, object) and dataclasses.is_dataclass(config)):
            broken(f"{self.kind}.options", f"the config is a {type(config).__name__}, and must be a dataclass")
        if "name" in {field.name for field in dataclasses.fields(config)}:
            broken(f"{self.kind}.options", "the config has a field 'name', which is taken by the plugin's own name")
        self._survives(config, "the round trip through Hydra's YAML", round_trip, f"{self.kind}.options")

    def _built(self, make: Callable[[], _T], interface: type[Any]) -> _T:
        """The object that `make` gives, which must be an `interface`, and another one each time."""
        rule = f"{self.kind}.build"
        with named(rule, "building it"):
            one, other = make(), make()
        if not isinstance(one, interface):
            room = ".".join(interface.__module__.split(".")[:2])
            broken(rule, f"it built {type(one).__name__}; give an {room}.{interface.__name__}")
        if one is other:
            broken(rule, f"a second build gave the same {type(one).__name__} again; make a new one")
        return one

    def _survives(self, config: Any, name: str, copied: Callable[[Any], Any], rule: str) -> None:
        with named(rule, f"{name} of {config!r}"):
            back = copied(config)
        if type(back) is not type(config) or dataclasses.asdict(back) != dataclasses.asdict(config):
            broken(rule, f"{name} makes {back!r} of {config!r}")

    def _config(self) -> type | None:
        return self.spec().config if self.plugin is not None else self.config

    def _config_or_skip(self) -> Any:
        if self._config() is None:
            pytest.skip("no config to test: name the plugin, or set `config` to its dataclass")
        return self.make_config()

    def _settings(self, num_examples: int, **changes: Any) -> settings:
        """The user's profile of Hypothesis, with what the suite needs."""
        users = settings()
        return settings(
            users,
            max_examples=self.num_examples or num_examples,
            deadline=None,
            derandomize=self.derandomize,
            database=None if self.derandomize else users.database,
            phases={*users.phases} - {Phase.explain, Phase.explain if self.shrinks else Phase.shrink},
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
            **changes,
        )

    def _examples(self, default: int, check: Callable[[st.DataObject], None]) -> None:
        """Run `check` on `default` examples, or as many as the user wants.

        It becomes a test of Hypothesis here: Hypothesis refuses an inherited test that runs under several classes.
        """
        self._settings(default)(given(st.data())(check))()


@cache
def _registry(suite: str) -> Registry:
    return Registry()


def from_text(arguments: Iterable[str]) -> dict[str, Any]:
    """``["length=3", "names=[a,b]"]`` as the values that they stand for in YAML. Raises ConfigError: a value that is no
    YAML.
    """
    values = OmegaConf.create()
    for argument in arguments:
        try:
            values.merge_with_dotlist([argument])
        except YAMLError as error:
            reason = getattr(error, "problem", None) or error
            raise ConfigError(
                f"the value of {argument!r} is no YAML: {reason}; write it as in length=3 or names=[a,b]"
            ) from error
    return cast("dict[str, Any]", OmegaConf.to_container(values))


def made(config: type, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass `config` with `values`, converted to the types of its fields. Raises ConfigError: a
    field that has no default is not among `values`; or OmegaConfBaseException: an unknown field, or a value of another
    type.
    """
    if not (values or _needs_values(config)):
        return config()  # also one that OmegaConf cannot hold, which breaks a rule of its own
    try:
        return OmegaConf.to_object(OmegaConf.merge(structured(config), dict(values)))
    except MissingMandatoryValue as error:
        key = error.full_key
        raise ConfigError(
            f"{config.__name__}.{key} has no default and is not given; give it, as in {key}=VALUE"
        ) from error


def _needs_values(config: type) -> bool:
    try:
        return bool(OmegaConf.missing_keys(structured(config)))
    except OmegaConfBaseException:
        return False


def round_trip(config: Any) -> Any:
    """`config` once through YAML, composed over the defaults of its class as Hydra does it."""
    written = OmegaConf.to_yaml(OmegaConf.structured(config))
    return OmegaConf.to_object(OmegaConf.merge(structured(type(config)), OmegaConf.create(written)))
