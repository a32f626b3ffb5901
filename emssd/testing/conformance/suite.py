"""The options of all suites: which plugin, which options, how many examples."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from emssd.plugins.hookspecs import Spec
from emssd.plugins.registry import Registry
from emssd.testing.conformance import options
from emssd.testing.conformance.rules import broken, named

__all__ = ["Suite"]

_T = TypeVar("_T")


class Suite:
    """Tests of one plugin; inherit one of the kinds.

    Attributes:
        plugin: name of an installed plugin, as in ``drafter=NAME``. Without it, override what makes the thing to test.
        options: by field, what differs from the defaults of the plugin's config; numbers, texts and lists as in YAML.
        config: the config dataclass, where no `plugin` is named. Without one the tests of options are left out.
        models: architectures of the tiny targets, keys of `emssd.testing.models.ARCHITECTURES`; or folders of targets,
            for a drafter that was trained for one. The option ``--emssd-models`` of pytest comes before it.
        num_examples: how many examples Hypothesis draws for each test; each test has a default. The pytest option
            ``--emssd-examples`` overrides it.
        derandomize: whether Hypothesis draws the same examples in every run.
    """

    kind: ClassVar[str]
    plugin: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    config: ClassVar[type | None] = None
    models: ClassVar[tuple[str, ...]] = ("llama", "opt")
    num_examples: ClassVar[int | None] = None
    derandomize: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def _options_of_pytest(self, request: pytest.FixtureRequest) -> None:
        """Take over ``--emssd-examples`` and ``--emssd-models``."""
        if examples := request.config.getoption("emssd_examples", None):
            self.num_examples = examples  # type: ignore[misc]  # of this test only
        if models := request.config.getoption("emssd_models", None):
            self.models = tuple(models.split(","))  # type: ignore[misc]  # as above

    def make_config(self) -> Any:
        """A new instance of the plugin's config."""
        config = self._config()
        assert config is not None, "name the plugin, or its config"
        with named(f"{self.kind}.options", f"{config.__name__} with the options {dict(self.options)}"):
            return options.made(config, self.options)

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
        roads: dict[str, Callable[[Any], Any]] = {
            "pickle": lambda value: pickle.loads(pickle.dumps(value)),
            "copy.copy": copy.copy,
            "copy.deepcopy": copy.deepcopy,
        }
        for name, road in roads.items():
            self._survives(config, name, road, f"{self.kind}.pickle")

    @pytest.mark.emssd_rule("options")
    def test_config_survives_the_command_line(self) -> None:
        """Hydra holds the options as a structured config and writes them as YAML."""
        config = self._config_or_skip()
        if not (isinstance(config, object) and dataclasses.is_dataclass(config)):
            broken(f"{self.kind}.options", f"the config is a {type(config).__name__}, and must be a dataclass")
        if "name" in {field.name for field in dataclasses.fields(config)}:
            broken(f"{self.kind}.options", "the config has a field 'name', which is taken by the plugin's own name")
        self._survives(config, "the way through Hydra's YAML", options.round_trip, f"{self.kind}.options")

    def _built(self, make: Callable[[], _T], interface: type[Any]) -> _T:
        """The object that `make` gives, which must be an `interface`, and another one each time."""
        rule = f"{self.kind}.build"
        with named(rule, "building it"):
            made, other = make(), make()
        if not isinstance(made, interface):
            room = ".".join(interface.__module__.split(".")[:2])
            broken(rule, f"it built {type(made).__name__}; give an {room}.{interface.__name__}")
        if made is other:
            broken(rule, f"a second build gave the same {type(made).__name__} again; make a new one")
        return made

    def _survives(self, config: Any, name: str, road: Callable[[Any], Any], rule: str) -> None:
        with named(rule, f"{name} of {config!r}"):
            back = road(config)
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
            phases=[phase for phase in users.phases if phase is not Phase.explain],
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
