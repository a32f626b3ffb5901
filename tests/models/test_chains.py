"""Drafts that a compiled draft model or head makes in one call are those that it makes level by level.

Oracles: the same program, called once a level, with attention called from Python; greedy decoding by the model itself.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from emssd_draft_model.drafter import DraftModelDrafter
from emssd_pard.drafter import PardDrafter
from filelock import FileLock

from emssd.attention import PagedBackend
from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.drafters import DynamicShape, GrowingRow, ModelDrafter, PairedDrafter
from emssd.drafters.heads.compiled import CompiledHead
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Drafter
from emssd.model import CausalLMRunner, Growth, ModelOptions, TargetModel
from emssd.model.program import Program
from emssd.native import cache_dir
from emssd.plugins.registry import Registry
from emssd.sampling import SamplingParams
from emssd.sequences import Request
from emssd.testing.models import tiny_model
from tests.support.perfect_head import random_head
from tests.support.right_drafters import trial
from tests.support.right_drafts import Load
from tests.support.tiers import few

VOCAB_SIZE = 13
PROMPTS = [[3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4, 5, 6, 7], [8], [9, 3, 11, 4, 9, 3, 12, 5, 9, 3] * 3, [10, 6]]
NUM_NEW = 40  # so that rows fill pages of 16 tokens in the middle of a chain

Drafts = list[tuple[tuple[int, ...], list[int], tuple[float, ...] | None]]


@pytest.fixture(autouse=True)
def _kernels(kernels: None) -> None:
    """All of these tests need them."""


class Uneven(BudgetPolicy):
    """Other lengths in each step and row, 0 among them."""

    def __init__(self, longest: int = 6) -> None:
        self._longest, self.num_steps = longest, 0

    def allot(self, step: BudgetStep) -> list[int]:
        self.num_steps += 1
        return [
            min(limit, (self.num_steps * 3 + row * 5) % (self._longest + 1)) for row, limit in enumerate(step.limits)
        ]


def record(drafter: Drafter, drafts: Drafts) -> None:
    """Note in `drafts` what `drafter` drafts from here on."""
    propose = drafter.propose

    def proposed(*arguments: Any) -> Draft:
        draft = propose(*arguments)
        drafts.append((draft.indptr, draft.token_ids.tolist(), draft.confidence))
        return draft

    drafter.propose = proposed  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def models(kernels: None) -> dict[str, TargetModel]:
    """A target, and a draft model with other weights, which shares its program."""
    make = partial(tiny_model, "opt", dtype=torch.float32, num_hidden_layers=1, vocab_size=VOCAB_SIZE, max_model_len=64)
    with FileLock(cache_dir() / "opt-float32.lock"):
        options = ModelOptions(compile=True)
        made = {name: TargetModel(make(seed=seed), options) for seed, name in enumerate(("target", "draft"))}
        assert all(target.compiled is not None for target in made.values())
    return made


def decoded(
    models: dict[str, TargetModel], draft: str, kinds: list[SamplingParams | None], tree: DynamicShape | None = None
) -> tuple[Any, Drafts, Any]:
    spec = replace(models[draft].kv_cache_spec(4), trees=tree is not None)
    runner = CausalLMRunner(models[draft], make_backend(spec, "ragged", Registry()))
    chains = DraftModelDrafter(runner, VOCAB_SIZE, num_speculative_tokens=6)
    drafter: Drafter = chains if tree is None else ModelDrafter(runner, VOCAB_SIZE, tree)
    drafts = Drafts()
    record(drafter, drafts)
    options = EngineOptions(batch_size=3, max_step_tokens=24, on_drafter_error=OnDrafterError.fail)
    engine = Engine.assemble(models["target"], None, drafter=drafter, backend="ragged", options=options, eos=())
    engine.drafting.policy = Uneven()
    pairs = enumerate(zip(PROMPTS, kinds, strict=True))
    done = engine.run(
        [Request(str(row), tuple(ids), NUM_NEW, frozenset(), sampling=kind) for row, (ids, kind) in pairs]
    )
    return {each.request_id: each.token_ids for each in done}, drafts, engine.report


SHAPES = {
    "chain": None,
    "tree": DynamicShape(9, 4, 3),
    "unsure": DynamicShape(6, 6, 2, temperature=2.0, min_confidence=0.2),
    "wide": DynamicShape(40, 5, 99),  # the vocabulary is smaller
}


@pytest.mark.parametrize(
    ("draft", "kind"), [("target", "chain"), ("target", "tree"), *(("draft", kind) for kind in SHAPES)]
)
def test_a_draft_model(models: dict[str, TargetModel], draft: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows that begin, in pieces, and end; of lengths that differ from row to row."""
    at_once, grow = list[list[int]](), Program.grow

    def counted(program: Program, inputs: Any, step: Any, growth: Growth) -> Any:
        at_once.append(growth.depths)
        return grow(program, inputs, step, growth)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "grow", counted)
        patch.setattr(PagedBackend, "forward", lambda *_: pytest.fail("attention from Python"))
        texts, drafts, report = decoded(models, draft, [None] * 4, SHAPES[kind])
    assert len(at_once) > 10
    assert any(len({*lengths}) == 3 for lengths in at_once)
    with monkeypatch.context() as patch:
        patch.setattr(CausalLMRunner, "grow", lambda *_: None)
        patch.setattr(PagedBackend, "native_step", lambda *_: None)
        assert decoded(models, draft, [None] * 4, SHAPES[kind])[:2] == (texts, drafts)
    if draft == "target" and kind == "chain":
        assert report.num_accepted == report.num_drafted > 3 * NUM_NEW // 2
    if draft == "target":
        assert report.num_accepted > 3 * NUM_NEW // 2


def test_a_drafter_of_one_pass_does_not_grow_by_levels(
    models: dict[str, TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Program, "grow", lambda *_: pytest.fail("a pass for each level"))
    backend = make_backend(models["draft"].kv_cache_spec(1), "ragged", Registry())
    drafter = PardDrafter(CausalLMRunner(models["draft"], backend), VOCAB_SIZE, 1, 4)
    options = EngineOptions(batch_size=1, on_drafter_error=OnDrafterError.fail)
    engine = Engine.assemble(
        models["target"], None, drafter=drafter, backend="ragged", budget="fixed", options=options, eos=()
    )
    assert len([*engine.run([Request("0", tuple(PROMPTS[0]), 12)])]) == 1
    assert engine.report.num_drafted > 0


def test_rows_that_are_sampled_are_drafted_for_level_by_level(models: dict[str, TargetModel]) -> None:
    kinds = [
        None,
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(repetition_penalty=1.4, temperature=0.0),
        None,
    ]
    texts, _, report = decoded(models, "target", kinds)
    assert report.num_accepted == report.num_drafted > 0
    assert texts["0"] == decoded(models, "target", [None] * 4)[0]["0"]


def with_program(load: Load) -> Load:
    def loaded(options: Any, context: Any) -> Any:
        drafter: Any = load(options, context)
        drafter._runner._compiled = CompiledHead(drafter._head)
        return drafter

    return loaded


@pytest.mark.costly("compiles a head")
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_a_head_that_is_always_right(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairedDrafter, "_grow_trees", lambda *_: pytest.fail("a pass for each level"))
    own = trial("eagle3")
    own.load = with_program(own.load)
    own.make_engine({"tree": tree})
    own.decode()
    assert own.is_full()


@pytest.mark.costly("compiles a head")
@pytest.mark.parametrize(
    ("tree", "least"), few([("chain", 0.3), ("dynamic", 0.0), ("chain", 0.0), ("dynamic", 0.3)], ci=2)
)
def test_a_head_with_uneven_budgets(tree: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a token that is not sure ends its chain, and where the head knows some of the target's tokens only."""

    drafts, grown = Drafts(), list[Any]()

    def unsure(load: Load) -> Load:
        def loaded(options: Any, context: Any) -> Any:
            drafter: Any = with_program(load)(options, context)
            shape: Any = drafter.shape
            shape.temperature, shape.least = 3.0, math.log(least) if least else -math.inf
            drafts[:] = grown[:] = []
            record(drafter, drafts)
            finish = drafter.finish

            def finished(rows: list[GrowingRow]) -> None:
                grown.extend((row.tree.token_ids, row.tree.parents, row.tree.log_probs) for row in rows)
                finish(rows)

            drafter.finish = finished
            return drafter

        return loaded

    def run() -> tuple[Drafts, list[Any]]:
        options = {"tree": tree, "depth": 6, "path": random_head("eagle3").path}
        own = trial("eagle3")
        own.load = unsure(own.load)
        own.make_engine(options, batch_size=3).drafting.policy = Uneven(6 if tree == "chain" else 16)
        own.decode()
        return [*drafts], [*grown]

    at_once, trees = run()
    monkeypatch.setattr(PairedDrafter, "grow_at_once", lambda *_: False)
    assert run() == (at_once, trees)
    assert max(indptr[-1] for indptr, *_ in at_once) > 6
    cut = sum(least > min(sure) for _, _, sure in at_once if sure)
    assert cut > 3 or not least
