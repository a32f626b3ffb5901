"""The target's own rounded weights draft on its own KV cache: no token changes, and exact weights are accepted in full.

Oracles: plain decoding and sampling by hand, in float64.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import emssd_self_draft
import pytest
import torch
from emssd_cascade import CascadeConfig
from emssd_self_draft import SelfConfig
from emssd_testing.models import tiny_model
from emssd_union import UnionConfig

import emssd.model.run.rounded
from emssd.decoding.engine import Engine
from emssd.draft_models import SharedDrafter
from emssd.errors import ConfigError
from emssd.model.run.rounded import RoundedRunner
from tests.support.right_drafters import decode, loading, target
from tests.support.right_drafts import KINDS, Trial
from tests.support.tiers import looped

DEPTH = 4
SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "dynamic": {"tree": "dynamic", "num_nodes": 14, "top_k": 3}}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES)


def trial() -> Trial:
    load = loading(emssd_self_draft, SelfConfig, lambda: {"depth": DEPTH})
    return Trial(target(), DEPTH, load, waits=False)


def make_engine(backend: str = "ragged", **options: Any) -> Engine:
    return trial().make_engine(options, backend)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds nothing, so the drafter is the target."""

    class Kept:
        def __init__(self, weight: torch.Tensor) -> None:
            self.weight = weight

        def dense(self, dtype: torch.dtype) -> torch.Tensor:
            return self.weight

    monkeypatch.setattr(emssd.model.run.rounded, "rounded_linear", lambda layer, bits: Kept(layer.weight.detach()))


@pytest.mark.usefixtures("exact")
@looped("backend", ["ragged", "padded"])
@looped("kinds", KINDS)
@EVERY_SHAPE
def test_exact_weights_are_always_accepted(shape: str, kinds: str, backend: str) -> None:
    engine = make_engine(backend, **SHAPES[shape])
    decode(engine, KINDS[kinds])
    (at_first, *_), accepted = sorted(engine.report.acceptance_histogram), engine.report.mean_acceptance_length
    assert at_first == 1
    assert accepted > 3.5
    if shape == "chain":
        assert engine.report.num_accepted == engine.report.num_drafted


@looped("bits", [4, 8])
@looped("kinds", KINDS)
@EVERY_SHAPE
def test_rounded_weights_change_no_token(shape: str, kinds: str, bits: int) -> None:
    engine = make_engine(bits=bits, **SHAPES[shape])
    decode(engine, KINDS[kinds])
    assert engine.report.num_accepted > 0


def test_the_first_layers_alone() -> None:
    engine = make_engine(layers=1)
    decode(engine)
    assert engine.report.num_drafted > 0


@pytest.mark.costly("little memory makes many steps")
@EVERY_SHAPE
def test_rows_that_are_preempted_and_prompts_in_pieces(shape: str) -> None:
    trial().decode_preempted(SHAPES[shape], all_right=False)


def test_a_draft_computes_no_token_that_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slot of the committed KV is written, in any pass of a draft."""
    committed, starts = dict[str, int](), list[bool]()
    run, begin = RoundedRunner.run, SharedDrafter._begin

    def noted(self: Any, batch: Any, budget: Any) -> Any:
        committed.update({row.request_id: row.num_cached for row in batch})
        return begin(self, batch, budget)

    def checked(self: Any, packed: Any) -> Any:
        rows = zip(packed.request_ids, packed.kv_lens, packed.lengths, strict=True)
        starts.extend(end - length >= committed[name] for name, end, length in rows)
        return run(self, packed)

    monkeypatch.setattr(SharedDrafter, "_begin", noted)
    monkeypatch.setattr(RoundedRunner, "run", checked)
    decode(make_engine(**SHAPES["dynamic"]))
    assert starts
    assert all(starts)


def test_a_model_that_changes_is_rounded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two runs all weights become others; the drafts are right only if their copy does."""
    model = tiny_model("llama", vocab_size=13, dtype=torch.float32)
    options = {"budget": "fixed", "drafter": SelfConfig(bits=8), "batch_size": 2}
    made = Mock(wraps=emssd.model.run.rounded.RoundedWeights)
    monkeypatch.setattr(emssd.model.run.rounded, "RoundedWeights", made)
    engine = Engine.from_model(model, frozen=True, **options)
    engine.generate([[1, 2, 3]], 6, ignore_eos=True)
    engine.generate([[1, 2, 3]], 6, ignore_eos=True)
    assert made.call_count == 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    engine.refresh()
    (text,) = engine.generate([[1, 2, 3]], 6, ignore_eos=True)
    assert made.call_count == 2
    (plain,) = Engine.from_model(model, drafter="none", budget="fixed").generate([[1, 2, 3]], 6, ignore_eos=True)
    assert text.token_ids == plain.token_ids


OTHERS = {
    "cascade": CascadeConfig(["llma", "self"], {"llma": {"match_length": 1, "copy_length": 3}}),
    "union": UnionConfig(["llma", "self"], {"llma": {"match_length": 1, "copy_length": 3}, "self": {"depth": 3}}),
    "self": SelfConfig(),
}


@looped("kinds", ["greedy", "mixed"])
@looped("name", OTHERS)
@pytest.mark.parametrize("budget", ["fixed", "adaptive"])
def test_beside_other_drafters_and_with_any_budget(budget: str, name: str, kinds: str) -> None:
    engine = Engine.from_model(target().model, drafter=OTHERS[name], budget=budget, batch_size=4)
    decode(engine, KINDS[kinds])
    assert engine.report.num_drafted > 0


@looped(
    ("options", "words"),
    [
        ({"bits": 3}, "drafter.bits is 3; choose 4 or 8"),
        ({"layers": 4}, "drafter.layers is 4; choose 1 to 3, as the target has"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_engine(**options)
    assert str(raised.value) == words
