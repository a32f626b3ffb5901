"""Any text as an option gives valid options or an error of ours in one sentence, never another exception."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import string
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from emssd.cli import command as cli
from emssd.cli.config import RunConfig
from emssd.cli.jobs import Jobs
from emssd.decoding.options import DEFAULT_DRAFTER
from emssd.plugins.registry import Registry


@pytest.fixture
def compose(emssd: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[RunConfig]]]:
    """``compose(*arguments)`` ends where decoding would begin; gives the result, and the options of each run."""
    runs: list[RunConfig] = []
    monkeypatch.setattr(Jobs, "run", lambda self, config, *_: runs.append(config))
    monkeypatch.setattr(Jobs, "run_of_experiment", lambda self, config, *_: runs.append(config))
    monkeypatch.setattr(Jobs, "finish", lambda self: None)
    registry = Registry()
    monkeypatch.setattr(cli, "Registry", lambda: registry)

    def run(*arguments: str) -> tuple[Any, list[RunConfig]]:
        runs.clear()
        return emssd(*arguments), list(runs)

    return run


_ODD = "{}[]()'\"\\$~+=,:@#.;*?!&|<>^%` \n\té√😀"
_ANY = st.characters(exclude_categories=["Cs"], exclude_characters="\0")  # a command line holds no other
_ATOMS = st.one_of(
    st.integers(), st.integers(-(10**40), 10**40), st.floats().map(str), st.booleans(), st.text(_ODD, max_size=6),
    st.text(string.ascii_letters, max_size=4), st.text(_ODD).map(lambda text: f"'{text}'"),
    st.sampled_from(["null", "", "???", "nan", "-inf", "1e400", "0x10", "1_000", "on", "llma", "none", "toy"]),
    st.sampled_from(["${nope}", "${batch_size}", "${oc.env:NOPE}", "${drafter}", "${model.path}", "${now:%Y}", "${..}",
                     "${oc.decode:[}", "${oc.create:{a:1}}", "${oc.dict.keys:model}", "${hydra:runtime.cwd}", "\\${a}",
                     "${emssd_help:}", "${${size}}", "choice(1,2)", "range(3)", "int(x)", "glob(*)", "sort(2,1)"]),
).map(str)  # fmt: skip
_PLAIN = st.sampled_from(["1", "3", "true", "false", "null", "0.5", "auto", "greedy", "toy", "'a b'", "[a,b]", "1,2"])
_VALUES = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.lists(inner, min_size=1, max_size=3).map(",".join),
        st.dictionaries(_ATOMS, inner, max_size=2).map(
            lambda items: "{" + ",".join(f"{key}:{value}" for key, value in items.items()) + "}"
        ),
    ),
    max_leaves=5,
)


@st.composite
def overrides(draw: st.DrawFn) -> str:
    """Like ``+GROUP.OPTION@PACKAGE=VALUE``, or anything at all."""
    options = [field.name for field in dataclasses.fields(RunConfig) if field.name != "output_dir"]
    inside = ["drafter.copy_length", "drafter.name", "model.compile", "model.architecture", "model.architecture.a.b",
              "data.limit", "data.where.x", "budget.memory", "budget", "stop[0]", "hydra.verbose", "hydra.job.num",
              "hydra/launcher", "hydra.sweeper.params", "hydra.overrides.task", "hydra", "defaults", ""]  # fmt: skip
    kind = draw(st.sampled_from(["plain"] * 3 + ["odd"] * 3 + ["anything"]))
    if kind == "plain":
        return f"{draw(st.sampled_from(options))}={draw(_PLAIN)}"
    if kind == "anything":
        return draw(st.text(_ODD + "az09", max_size=12)).lstrip("-")  # those are flags
    name = draw(st.sampled_from(options + inside) | st.text(string.ascii_lowercase + "._@/", max_size=8))
    prefix, between = (
        draw(st.sampled_from(["", "", "", "+", "++", "~"])),
        draw(st.sampled_from(["="] * 8 + ["", "@x="])),
    )
    return f"{prefix}{name}{between}{draw(_VALUES)}".lstrip("-")


@pytest.mark.nightly
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # each run begins with an empty output
@given(st.lists(overrides(), min_size=1, max_size=2), st.booleans())
@example(["={}"], False)
@example(["++experiment={True:-828}"], False)
@example(["~batch_size"], False)
def test_any_overrides_give_options_that_can_be_or_a_sentence(
    compose: Callable[..., tuple[Any, list[RunConfig]]], arguments: list[str], is_sweep: bool
) -> None:
    result, runs = compose(*["-m"] * is_sweep, *arguments)
    if result.status:
        assert len(result.sentence) > 10
    for options in runs:
        assert isinstance(options, RunConfig)
        _assert_valid(dataclasses.asdict(options))


def _assert_valid(value: Any) -> None:
    """No number in `value` is one with which nothing can be computed."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _assert_valid(item)
    assert not isinstance(value, (int, float)) or (math.isfinite(value) and abs(value) < 2**63)


@pytest.mark.nightly
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])  # as above
@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0") | st.sampled_from(_ODD)), st.booleans()
)
@example("${", False)
@example("\\\\${a}\\", True)
@example("Hello, world: {a: [1, 'b']} \"c\" = d", True)
@example("'quoted' and 'quoted'", False)
def test_a_prompt_is_taken_as_it_stands(
    compose: Callable[..., tuple[Any, list[RunConfig]]], prompt: str, is_sweep: bool
) -> None:
    quoted = re.fullmatch(r"""'.*'|".*\"""", prompt, re.DOTALL)
    result, runs = compose(*["-m"] * is_sweep, f"prompt={prompt}")
    if prompt != "null" and not quoted:
        assert [run.prompt for run in runs] == [prompt], result


def test_a_prompt_in_hydras_quotes_is_left_to_hydra(compose: Callable[..., tuple[Any, list[RunConfig]]]) -> None:
    for typed, prompt in (("'a, b'", "a, b"), ('"a \\"b\\""', 'a "b"'), ("null", None), ("", "")):
        assert [run.prompt for run in compose(f"prompt={typed}")[1]] == [prompt]


def test_without_any_argument_the_defaults_run(compose: Callable[..., tuple[Any, list[RunConfig]]]) -> None:
    result, (options,) = compose()
    assert result.status == 0
    assert (options.drafter.name, options.data.name) == (DEFAULT_DRAFTER, "demo")


def test_a_fault_of_ours_keeps_its_traceback(
    compose: Callable[..., tuple[Any, list[RunConfig]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(Jobs, "run", fails)
    with pytest.raises(KeyError, match="ours"):
        compose()
    assert "HYDRA_FULL_ERROR" not in os.environ
