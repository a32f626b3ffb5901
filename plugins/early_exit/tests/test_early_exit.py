"""With all of the target's layers every draft is accepted; with any fault it is not, and no token ever changes.

Oracles: plain decoding and sampling by hand; models with fewer layers, run without a cache. float64.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from typing import Any

import emssd_early_exit
import pytest
import torch
from emssd_early_exit import EarlyExitConfig

import emssd.drafters.levels
from emssd.decoding.packing import pack_nodes
from emssd.drafters import GrowingRow, ModelDrafter, shallow_runner
from emssd.drafting import Draft, Drafter, DrafterContext
from emssd.errors import ConfigError
from emssd.model import TargetModel
from emssd.sequences import Batch
from emssd.testing.models import tiny_model
from tests.support.self_drafts import KINDS, NUM_NEW, decode, is_full, make_engine, run_in_little_memory
from tests.support.tiers import looped

DEPTH = 4
SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "dynamic": {"tree": "dynamic", "num_nodes": 14, "top_k": 3}}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES)
Build = Callable[[DrafterContext], Drafter]


def drafter(*, sure: bool = True, **options: Any) -> Build:
    """`sure`: its trees have the likeliest token of every level, whatever else."""

    def build(context: DrafterContext) -> Drafter:
        (spec,) = emssd_early_exit.emssd_drafters()
        made: ModelDrafter = spec.build(EarlyExitConfig(**({"num_layers": 3, "depth": DEPTH} | options)), context)
        if sure:
            made.shape.temperature = 0.01
        return made

    return build


@looped("backend", ["ragged", "padded"])
@looped("kinds", KINDS)
@EVERY_SHAPE
def test_all_layers_are_always_accepted(shape: str, kinds: str, backend: str) -> None:
    engine = make_engine(drafter(**SHAPES[shape]), backend)
    decode(engine, KINDS[kinds])
    assert is_full(engine, DEPTH)


@EVERY_SHAPE
def test_prompts_in_pieces(shape: str) -> None:
    engine = make_engine(drafter(**SHAPES[shape]), max_step_tokens=6, batch_size=2)
    assert all(generation.num_accepted > NUM_NEW // 2 for generation in decode(engine))


@EVERY_SHAPE
def test_rows_that_are_preempted_begin_anew(shape: str) -> None:
    engine = run_in_little_memory(drafter(**SHAPES[shape]))
    if shape == "chain":
        assert engine.report.num_accepted == engine.report.num_drafted > 0


def test_a_chain_ends_behind_a_token_that_is_not_sure_enough() -> None:
    """Of the perfect drafter, whose confidence is the target's own, a lower bar gives longer drafts."""
    drafted = list[int]()
    for least in (0.0, 0.5, 1.0):
        engine = make_engine(drafter(sure=False, min_confidence=least))
        decode(engine)
        assert engine.report.num_accepted == engine.report.num_drafted
        drafted.append(engine.report.num_drafted)
    assert drafted[0] > drafted[1] > drafted[2]
    assert {*engine.report.acceptance_histogram} == {1, 2}, "one token at most is drafted where none is sure"


def one_layer_less(patch: pytest.MonkeyPatch) -> None:
    def fewer(context: DrafterContext, num_layers: int, *, trees: bool) -> Any:
        return shallow_runner(context, num_layers - 1, trees=trees)

    patch.setattr(emssd.drafters, "shallow_runner", fewer)


def positions_of_nodes(patch: pytest.MonkeyPatch) -> None:
    def shifted(*arguments: Any) -> Any:
        packed = pack_nodes(*arguments)
        return replace(packed, position_ids=packed.position_ids + 1)

    patch.setattr(emssd.drafters.levels, "pack_nodes", shifted)


def logits_of_other_rows(patch: pytest.MonkeyPatch) -> None:
    catch_up = ModelDrafter.catch_up

    def rolled(self: Any, rows: list[GrowingRow]) -> torch.Tensor:
        return catch_up(self, rows).roll(1, 0)

    patch.setattr(ModelDrafter, "catch_up", rolled)


def kv_that_is_not_moved(patch: pytest.MonkeyPatch) -> None:
    """The tree's first nodes stay in the cache in the place of the accepted way."""
    keep = ModelDrafter._keep
    patch.setattr(ModelDrafter, "_keep", lambda self, names, kv_lens, sources=(): keep(self, names, kv_lens))


FAULTS = {
    "one layer less": one_layer_less,
    "nodes one position too deep": positions_of_nodes,
    "logits of other rows": logits_of_other_rows,
    "KV of rejected nodes": kv_that_is_not_moved,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_accepted_less_and_no_token_changes(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    engine = make_engine(drafter(**SHAPES["dynamic"]))
    decode(engine)
    assert not is_full(engine, DEPTH)
    assert engine.report.num_drafted > 0


@cache
def model_of(architecture: str) -> TargetModel:
    return TargetModel(tiny_model(architecture, vocab_size=13, max_model_len=64))


def naive(model: Any, tokens: Seq[int], count: int, num_layers: int) -> list[int]:
    """What the first layers continue with: the whole text again for each token, and no layer behind them."""
    layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    behind, text = list(layers)[num_layers:], list(tokens)
    hooks = [layer.register_forward_hook(lambda module, given, out: given[0]) for layer in behind]
    with torch.inference_mode():
        for _ in range(count):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    for hook in hooks:
        hook.remove()
    return text[len(tokens) :]


@looped("architecture", ["llama", "qwen2", "gpt_neox", "opt", "gemma2"])
def test_it_drafts_what_the_first_layers_say_without_a_cache(architecture: str) -> None:
    """In every step of a run in which some of it is accepted and some is not."""
    model, drafts = model_of(architecture), list[tuple[list[int], list[int]]]()

    class Noted(ModelDrafter):
        def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
            draft = super().propose(batch, budget)
            rows = draft.token_ids.split(draft.lengths)
            drafts.extend((list(row.tokens), own.tolist()) for row, own in zip(batch, rows, strict=True))
            return draft

    def build(context: DrafterContext) -> Drafter:
        made = drafter(num_layers=1, depth=3)(context)
        made.__class__ = Noted
        return made

    engine = make_engine(build, model=model)
    prompts = [(3, 4, 5, 6, 3, 4), (8,), (9, 10, 9, 10, 9, 10, 11)]
    engine.generate(prompts, 12, ignore_eos=True)
    for tokens, drafted in drafts:
        assert drafted == naive(model.model, tokens, len(drafted), 1)
    assert 0 < engine.report.num_accepted < engine.report.num_drafted


@looped(("num_layers", "quarter"), [(1, 1), (4, 1), (5, 2), (12, 3)])
def test_a_quarter_of_the_layers_is_the_default(num_layers: int, quarter: int) -> None:
    model = TargetModel(tiny_model("llama", num_hidden_layers=num_layers, hidden_size=8, intermediate_size=4))
    made: Any = make_engine(drafter(num_layers=None), model=model).drafting.drafters[0].drafter
    assert made._runner.num_layers == quarter


@looped(
    ("options", "words"),
    [
        ({"num_layers": 0}, "drafter.num_layers is 0; choose 1 to 3, as the target has"),
        ({"num_layers": 4}, "drafter.num_layers is 4; choose 1 to 3, as the target has"),
        ({"tree": "static"}, "drafter.tree is 'static'; choose one of chain, dynamic"),
        ({"depth": 0}, "drafter.depth is 0; it must be at least 1"),
        ({"tree": "dynamic", "top_k": 0}, "drafter.top_k is 0; it must be at least 1"),
        ({"min_confidence": 1.5}, "drafter.min_confidence is 1.5; it must be from 0 to 1"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_engine(drafter(**options))
    assert str(raised.value) == words


def test_without_a_model_there_are_no_layers() -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        pytest.fail("it asks for another model")

    context = DrafterContext(9, None, fails, fails)
    with pytest.raises(ConfigError, match=r"^the drafter runs layers of the target, and there is no model to take"):
        drafter()(context)
