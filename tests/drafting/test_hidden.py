"""Hidden states reach a drafter once for each token that is kept, in order, whatever is drafted, cut or preempted.

Oracle: `output_hidden_states=True` of Transformers, one plain pass over the final sequence, float64.
OPT has no norm in float32, so that nothing but the order of sums makes a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emssd_ragged.backend import ragged_backend
from emssd_testing.choice_runner import ChoiceRunner
from emssd_testing.drafters import ChainDrafter, RandomDrafter, TreeDrafter
from emssd_testing.models import tiny_model
from emssd_testing.oracle import References
from emssd_union.drafter import UnionDrafter

from emssd import Engine
from emssd.attention import AttentionBackend, PagedBackend
from emssd.drafting import Draft, Drafter, HiddenStates, Outcome
from emssd.drafting.checked import CheckedDrafter
from emssd.errors import DraftError, PluginError, PluginWarning, UnsupportedModelError
from emssd.model import TargetModel
from emssd.sequences import Batch, Request
from tests.support.backends import BACKENDS, engine_of, runner_of
from tests.support.hidden import Listener
from tests.support.reference_kernels import ReferenceKernels
from tests.support.tiers import looped

VOCAB_SIZE = 11
PROMPTS = [(1, 2, 3, 1, 2), (4,), tuple(range(10)) * 2, (3, 3, 7), (5, 1, 5, 1, 5, 2, 9)]
NEW_TOKENS = 12


@cache
def references() -> References:
    return References(TargetModel(tiny_model("opt", vocab_size=VOCAB_SIZE, max_model_len=64)), 24)


def decode(
    backend: AttentionBackend,
    drafter: Drafter | Seq[Drafter],
    *,
    prompts: Seq[tuple[int, ...]] = PROMPTS,
    eos: bool = False,
    **options: Any,
) -> Engine:
    """Decode and hold every token to greedy decoding."""
    engine = engine_of(references().target, drafter, backend, **{"max_step_tokens": 16} | options)
    ends = [frozenset(references()[prompt][4:5]) if eos else frozenset[int]() for prompt in prompts]
    requests = [
        Request(f"r{i}", prompt, NEW_TOKENS, end) for i, (prompt, end) in enumerate(zip(prompts, ends, strict=True))
    ]
    done = {row.request_id: row.token_ids for row in engine.run(requests)}
    assert [done[request.request_id] for request in requests] == [references().of(request) for request in requests]
    return engine


def hold_all(listener: Listener, number: int = len(PROMPTS)) -> None:
    assert len(listener.finished) == number
    for name in list(listener.finished):
        listener.hold_to(references().target.model, name)


@looped("eos", [False, True])
@looped("name", BACKENDS)
def test_trees_and_prompts_in_pieces_give_the_states_of_one_plain_pass(name: str, eos: bool) -> None:
    listener = Listener(TreeDrafter(VOCAB_SIZE, 8, references(), right=0.7))
    engine = decode(BACKENDS[name](), listener, eos=eos)
    assert 0 < engine.report.num_accepted < engine.report.num_drafted
    assert any(len(row) > 1 for row in listener.deliveries.values())
    hold_all(listener)


def test_a_preempted_row_begins_anew() -> None:
    listener = Listener(TreeDrafter(VOCAB_SIZE, 6, references(), right=0.7))
    engine = decode(ragged_backend(page_size=1, kernels="torch"), listener, max_tokens=40)
    assert engine.report.num_preempted > 0
    assert listener.num_again == engine.report.num_preempted
    hold_all(listener)


def test_no_prefix_is_shared_where_states_are_wanted() -> None:
    prompts = [tuple(range(10)) * 2 + (last,) for last in range(5)]
    inner = RandomDrafter(VOCAB_SIZE, 3, references())
    plain = decode(ragged_backend(page_size=1, kernels="torch"), inner, prompts=prompts, prefix_caching=True)
    assert plain.report.num_adopted_tokens > 0
    listener = Listener(RandomDrafter(VOCAB_SIZE, 3, references()))
    engine = decode(ragged_backend(page_size=1, kernels="torch"), listener, prompts=prompts, prefix_caching=True)
    assert engine.report.num_adopted_tokens == 0
    hold_all(listener)


def test_a_recorded_step_writes_its_states_anew() -> None:
    """A recording runs again on its own buffers; a drafter may keep what it got in earlier steps."""
    recorded = 0

    def capture(compute: Callable[[], Any]) -> Callable[[], Any]:
        nonlocal recorded
        recorded += 1
        kept = compute()  # the buffers of the recording, which every replay writes to

        def replay() -> Any:
            logits, hidden = compute()
            kept[0].copy_(logits)
            for index, states in hidden.items():
                kept[1][index].copy_(states)
            return kept

        return replay

    kernels = ReferenceKernels(capture=capture, max_graph_tokens=40)
    listener = Listener(RandomDrafter(VOCAB_SIZE, 4, references()))
    engine = decode(PagedBackend(kernels, page_size=4, memory_fraction=1.0), listener)
    assert 0 < recorded < engine.report.num_steps
    hold_all(listener)


def test_each_drafter_of_several_hears_of_its_own_layers_for_all_rows() -> None:
    first, second = Listener(Never(VOCAB_SIZE, 2), (1,)), Listener(RandomDrafter(VOCAB_SIZE, 3, references()), (-1, 0))
    third = Deaf(VOCAB_SIZE, 3)
    decode(BACKENDS["ragged-page-3"](), [first, second, third])
    hold_all(first)
    hold_all(second)


class Never(ChainDrafter):
    def chain(self, row: Any, limit: int) -> list[int]:
        return []


class Deaf(RandomDrafter):
    """Asks for no hidden states, and hears of none."""

    def observe(self, outcome: Outcome) -> None:
        assert outcome.batch
        assert outcome.hidden is None


def test_who_asks_for_nothing_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target = references().target
    for name in ("register_forward_hook", "register_forward_pre_hook"):
        monkeypatch.setattr(torch.nn.Module, name, lambda *_, **__: pytest.fail("a hook"))
    decode(BACKENDS["ragged-page-3"](), Deaf(VOCAB_SIZE, 3, references()))
    fresh = TargetModel(tiny_model("opt", vocab_size=VOCAB_SIZE, max_model_len=64))
    assert fresh.streams is None
    assert target.compiled is None


def test_between_two_steps_the_model_has_no_hooks() -> None:
    model = tiny_model("opt", vocab_size=VOCAB_SIZE, max_model_len=64)  # none that Transformers has put hooks on

    class Looks(Listener):
        def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
            return super().propose(batch, budget)

    listener = Looks(RandomDrafter(VOCAB_SIZE, 3))
    Engine.from_model(model, drafter=listener, on_drafter_error="fail").generate(PROMPTS, NEW_TOKENS)
    assert len(listener.finished) == len(PROMPTS)


class Asks(Drafter):
    def __init__(self, layers: Any) -> None:
        self.hidden_layers = layers

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.empty(len(batch))


@looped("layers", [3, "1", (1.0,), (True,), (-2,), ("1",), None])
def test_layers_that_are_no_indices_are_refused_in_a_sentence(layers: Any) -> None:
    with pytest.raises(DraftError) as caught:
        CheckedDrafter(Asks(layers), "'mine' (mine 1.0)", VOCAB_SIZE)
    assert str(caught.value) == (
        f"drafter 'mine' (mine 1.0) broke its interface: its hidden_layers are {layers!r}; give a tuple of integers: 0 "
        f"for what the target's first layer gets, n for what its n-th layer gives, -1 for what its LM head is given"
    )


def test_a_layer_that_the_target_has_not_is_refused_in_a_sentence() -> None:
    sentence = (
        r"^a drafter asks for hidden states 3, and OPTForCausalLM has 2 layers; choose 0 \(what the first layer gets\) "
        r"to 2 \(what the last one gives\), or -1 \(what the LM head is given\)$"
    )
    with pytest.raises(UnsupportedModelError, match=sentence):
        decode(BACKENDS["ragged-page-3"](), Asks((0, 3)))


def test_a_runner_without_a_model_says_that_it_has_none() -> None:
    class Choices(ChoiceRunner):
        def choices(self, *arguments: Any) -> list[int]:
            return [1]

    with pytest.raises(UnsupportedModelError, match="a Choices has no hidden states to give to drafters"):
        Engine(Choices(VOCAB_SIZE), Asks((0,)))


def test_memory_that_runs_out_while_states_are_picked_is_the_drafters_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step counts by then, so that nothing else may fail."""
    monkeypatch.setattr(HiddenStates, "of", Mock(side_effect=torch.OutOfMemoryError("no room")))
    runner = runner_of(references().target, BACKENDS["ragged-page-3"]())
    engine = Engine(runner, Asks((0,)), batch_size=3)
    with pytest.warns(PluginWarning, match="failed in observe"):
        done = engine.generate(PROMPTS, NEW_TOKENS)
    assert [row.token_ids for row in done] == [references()[prompt][:NEW_TOKENS] for prompt in PROMPTS]
    with pytest.raises(PluginError, match="failed in observe"):
        engine_of(references().target, Asks((0,)), BACKENDS["dense"]()).generate(PROMPTS[:1], 3)


def test_a_union_hears_of_pieces_before_it_ever_drafted() -> None:
    inner = Listener(RandomDrafter(VOCAB_SIZE, 3, references()))
    union = UnionDrafter([CheckedDrafter(inner, None, VOCAB_SIZE, on_error="fail")])
    decode(BACKENDS["ragged-page-3"](), union, prompts=[tuple(range(10)) * 3], max_step_tokens=7)
    assert inner.num_without_batch >= 3
    hold_all(inner, 1)


def test_layers_are_given_once_and_read_once() -> None:
    with pytest.raises(DraftError, match=r"its hidden_layers are \(1, 1\); give each once"):
        CheckedDrafter(Asks((1, 1)), None, VOCAB_SIZE)
    drafter = Asks([2, 0])
    checked = CheckedDrafter(drafter, None, VOCAB_SIZE)
    drafter.hidden_layers = ()
    assert checked.hidden_layers == (2, 0)
