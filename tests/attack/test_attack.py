"""A few seconds of the attack, always the same; `nox -s attack` goes on from here."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from emssd.model import TargetModel
from tests.support.backends import CONFIGS as BACKENDS

from .areas import run_seeds
from .histories import PLACES, Fault, History
from .judge import Account
from .moods import SHAPES
from .oracle import Ask, Oracle
from .plain import judged_by_plain
from .runner import run_history
from .sins import ALL
from .worlds import World, draw_world, spoil
from .zoo import draw_model

ASKS = (Ask(0, 14), Ask(3, 9), Ask(4, 20, eos=(5,)), Ask(5, 6, arrives=3), Ask(1, 12, arrives=5))
SHARED = (Ask(0, 8), Ask(0, 14), Ask(0, 3, arrives=4))

PROMPTS = [tuple(range(20)), (3, 4), (), (5,) * 9, (7, 1, 2) * 4, (8, 9)]


@pytest.fixture(autouse=True)
def _kernels(kernels: None) -> None:
    """All of these tests need them."""


@cache
def world(seed: str) -> World:
    made = draw_world(seed, kinds=("mistral",))
    assert made is not None
    return made


@cache
def of_rules(kind: str, dtype: torch.dtype, length: int = 64) -> World:
    model = draw_model(random.Random(7), kind, vocab_size=31, max_model_len=length, dtype=dtype, window=4)
    prompts = [*PROMPTS, tuple(at * at % 31 for at in range(length - 20))]
    there = World(kind, model, TargetModel(model), Oracle(model, length), prompts)
    return there if dtype is torch.float64 else judged_by_plain(there, BACKENDS["fused"])


@pytest.mark.parametrize(
    ("area", "seeds"),
    [
        ("histories", range(1)),
        pytest.param("histories", range(1, 2), marks=pytest.mark.nightly),
        pytest.param("histories", range(10, 12), marks=pytest.mark.nightly),
        ("sampled", range(1)),
        ("stops", range(1)),
        pytest.param("stops", range(1, 2), marks=pytest.mark.nightly),
        ("rounded", range(1, 2)),
        ("foul", range(1)),
        ("bits", range(3, 4)),
        pytest.param("bits", range(4, 9), marks=pytest.mark.nightly),
        ("faults", range(1, 2)),
        ("sins", range(2, 3)),
    ],
)
@pytest.mark.costly("plays one random history of each kind")
def test_nothing_differs_from_the_oracle(area: str, seeds: range) -> None:
    account, refused = run_seeds(area, seeds)
    assert account.differences == []
    assert account.num_texts >= 8 * (len(seeds) - refused)
    assert account.num_drafted > account.num_texts


def test_rows_are_preempted() -> None:
    """The attack needs rows that are computed again."""
    account, _ = run_seeds("histories", range(5, 6))
    assert account.differences == []
    assert account.num_preempted >= 5


@pytest.mark.parametrize("backend", ["page 1", "fused", "recorded"])
def test_rows_that_share_kv_in_little_memory_are_those_that_do_not(backend: str) -> None:
    """Prompts in pieces, whose rows begin alike, come again, and lose their KV."""
    together = Account()
    for seed, room in enumerate((64, 40)):
        history = History(
            (*SHARED, *ASKS), seed, backend, max_step_tokens=9, room=room, headroom=0, moods=("some", "wrong"),
            shapes=("comb",) * seed, sharing=True, rounds=2, policy="chance",
        )  # fmt: skip
        together.add(run_history(of_rules("llama", torch.float64), history))
    assert together.differences == []
    assert together.num_preempted
    assert together.num_adopted > 100


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_keeps_the_rules_of_attention(backend: str) -> None:
    for kind, dtype in (
        ("mistral", torch.float64),
        ("gemma2", torch.float64),
        ("gpt2", torch.float64),
        ("qwen2", torch.bfloat16),
    ):
        there = of_rules(kind, dtype)
        for depth in (3, 8):
            history = History(
                ASKS, seed=depth, backend=backend, moods=("right then wrong", "right", "wrong"), depth=depth
            )
            account = run_history(there, history)
            assert account.differences == []
            assert account.num_logits > 40


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_keeps_the_rules_of_attention_in_trees(backend: str) -> None:
    """Windows of four tokens, which end within the tree, and layers without."""
    there = of_rules("qwen2", torch.float64)
    together = Account()
    for seed, shape in enumerate(SHAPES):
        moods = ("right", "right then wrong", "one wrong")
        history = History(ASKS, seed, backend, moods=moods, depth=10, shapes=(shape, "any"), sure=seed % 2 == 0)
        together.add(run_history(there, history))
    assert together.differences == []
    assert together.num_nodes > 300
    assert together.num_moved > 20


@pytest.mark.parametrize("backend", ["fused", "torch", "padded"])
def test_texts_longer_than_a_block_of_the_kernels(backend: str) -> None:
    there = of_rules("llama", torch.float64, 600)
    account = run_history(there, History((Ask(6, 6), Ask(1, 9)), backend=backend, depth=3, moods=("some",)))
    assert account.differences == []


@pytest.mark.parametrize("sin", ALL)
def test_a_drafter_that_breaks_the_rules_changes_no_token(sin: str) -> None:
    for seed, on_error in enumerate(("disable", "fail")):
        shapes = ("comb", "any") if on_error == "fail" else ()
        history = History(
            ASKS, seed=seed, sin=sin, chance=0.5, on_error=on_error, moods=("wrong", "right"), shapes=shapes, sure=True
        )
        account = run_history(world("a sinner's"), history)
        assert account.differences == []
        assert account.num_drafted > 0


@pytest.mark.parametrize("backend", ["fused", "torch", "padded", "unpad_kv"])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_fails_is_followed_by_right_ones(place: str, backend: str) -> None:
    for seed, error in enumerate(("Planted", "KeyboardInterrupt")):
        fault, moods = Fault(place, (2, 3, 5, 6, 8, 9), error), ("right then wrong", "some")
        history = History(ASKS, seed, backend, policy="half", on_error="fail", fault=fault, moods=moods, sharing=True)
        account = run_history(world("a failing"), history)
        assert account.differences == []
        assert account.num_raised > 0


@pytest.mark.parametrize("backend", ["fused", "page 3", "padded", "unpad_kv", "unpad_inputs", "unpad_both"])
def test_embeddings_that_are_not_finite_stay_in_their_own_rows(backend: str) -> None:
    for value in (float("nan"), float("inf")):
        model = draw_model(random.Random(1), "llama", vocab_size=31, max_model_len=64)
        target = TargetModel(model)
        there = World("llama", model, target, Oracle(model, 64), [*PROMPTS, (2, 30)], foul=(30,))
        spoil(model, 30, value)
        for asks in (ASKS, (*ASKS, Ask(6, 9)), (Ask(6, 1), *ASKS)):  # it is drafted; and is in a prompt, too
            history = History(asks, backend=backend, moods=("foul", "right", "foul"), batch_size=3)
            assert run_history(there, history).differences == []
