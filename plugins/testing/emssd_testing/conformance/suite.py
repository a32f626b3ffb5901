"""The common base of all suites: the plugin under test, its options, and the number of examples."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import MISSING, MissingMandatoryValue, OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]  # it ships no types

from emssd.errors import ConfigError
from emssd.hooks.hookspecs import Spec
from emssd.hooks.registry import Registry
from emssd.hooks.structured import structured
from emssd.sequences import Request, Row
from emssd_testing.conformance.rules import BrokenRule, broken, named, renamed
from emssd_testing.conformance.scripted import AGREEABLE, VOCAB_SIZE, Life, lives
from emssd_testing.conformance.setting import MODEL_LEN
from emssd_testing.conformance.worlds import World

__all__ = ["NEW_NAME", "ScriptedSuite", "Suite", "from_text", "made"]

_T = TypeVar("_T")
NEW_NAME = "for one that has a new name and is else the same"


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
    """

    kind: ClassVar[str]
    plugin: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    config: ClassVar[type | None] = None
    models: ClassVar[tuple[str, ...]] = ("llama", "opt")
    num_examples: ClassVar[int | None] = None
    derandomize: ClassVar[bool] = False
    shrinks: ClassVar[bool] = True

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


class ScriptedSuite(Suite, ABC):
    """Tests of plugins in an engine that follows scripts.

    Attributes:
        decides_at_random: the plugin draws at random on purpose. Then its outputs are not compared with another's.
    """

    decides_at_random: ClassVar[bool] = False

    def _for_any(self, num_examples: int, check: Callable[[list[Life], st.DataObject], object], **kinds: int) -> None:
        """Run `check` on any requests, as `lives` draws them; `kinds` are options of that."""

        def examine(data: st.DataObject) -> None:
            drawn = data.draw(lives(VOCAB_SIZE, **kinds), label="requests")
            with self._explained(drawn):
                check(drawn, data)

        self._examples(num_examples, examine)

    @contextmanager
    def _explained(self, drawn: Seq[Life] = ()) -> Iterator[None]:
        """Name a simpler rule in the place of the broken one, if that rule is broken too: it is the reason."""
        try:
            yield
        except BrokenRule as error:
            self._test_simpler_rules(error.rule.partition(".")[2], drawn)
            raise

    @abstractmethod
    def _test_simpler_rules(self, rule: str, drawn: Seq[Life]) -> None:
        """Test the rules that may be the reason for a broken one."""

    def _come_again(
        self,
        rule: str,
        drawn: Seq[Life],
        make_world: Callable[[], World],
        num_steps: int | None = None,
        *,
        fewer: int = 0,
        abandon: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """The outputs for a request whose id was released before, and for one that has a new name and is else the same.

        The first of `drawn` runs beside the others, and is released: at its end, and then comes again with the last
        one's prompt; or after `num_steps`, and comes again with its tokens less `fewer`. With `abandon`, a draft for it
        was never verified. The last one's script decides its steps then.
        """
        outputs = []
        request, last, by_id = drawn[0].request, drawn[-1], {life.request.request_id: life for life in drawn}
        for name in (request.request_id, "a new name"):
            world, first, others = make_world(), drawn[0].row(), [life.row() for life in drawn[1:]]
            running = [first, *others]
            while first in running and (num_steps is None or first.num_steps < num_steps):
                running = world.step(running, [by_id[row.request_id].decision(row) for row in running])
            if abandon and first in running:
                world.propose(running, [AGREEABLE] * len(running))
                world.release(row.request_id for row in running if row is not first)
            world.release([request.request_id])
            tokens = list(last.request.prompt_ids)
            if num_steps is not None:
                tokens = first.tokens[: max(len(request.prompt_ids), len(first.tokens) - fewer)]
            prompt = request.prompt_ids if num_steps is not None else last.request.prompt_ids
            rows = [Row(Request(name, prompt, MODEL_LEN - len(prompt), request.eos_token_ids), tokens)]
            begun = len(world.outputs(name))
            with renamed(rule, unless=self.test_limits):
                for _ in range(4):
                    rows = world.step(rows, [last.decision(row) for row in rows]) if rows else []
            outputs.append(world.outputs(name)[begun:])
        again, new = outputs
        return again, new

    @abstractmethod
    def test_limits(self) -> None:
        """Steps at the limits of the interface."""


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
    if not (values or _required(config)):
        return config()  # also one that OmegaConf cannot hold, which breaks a rule of its own
    try:
        return OmegaConf.to_object(OmegaConf.merge(structured(config), dict(values)))
    except MissingMandatoryValue as error:
        key = error.full_key
        raise ConfigError(
            f"{config.__name__}.{key} has no default and is not given; give it, as in {key}=VALUE"
        ) from error


def _required(config: type) -> list[str]:
    if not dataclasses.is_dataclass(config):
        return []
    return [
        field.name
        for field in dataclasses.fields(config)
        if field.default == MISSING or field.default is field.default_factory is dataclasses.MISSING
    ]


def round_trip(config: Any) -> Any:
    """`config` once through YAML, composed over the defaults of its class as Hydra does it."""
    written = OmegaConf.to_yaml(OmegaConf.structured(config))
    return OmegaConf.to_object(OmegaConf.merge(structured(type(config)), OmegaConf.create(written)))
