"""Hypothesis strategies for what emssd works on: ragged prompts, attention layers, drafts, histories of steps."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from hypothesis import strategies as st

from emssd.attention import LayerSpec
from emssd.drafting import BudgetPolicy, Draft, Drafter
from emssd.drafting.budget import FixedBudget
from emssd.testing.budgets import ScriptedBudget
from emssd.testing.drafters import EosDrafter, PerfectDrafter, RandomDrafter, ScriptedDrafter, WrongDrafter

__all__ = [
    "drafters",
    "drafts",
    "kv_layers",
    "layer_specs",
    "policies",
    "prompt_batches",
    "prompts",
    "scripts",
    "step_histories",
]


def prompts(vocab_size: int, max_length: int = 12) -> st.SearchStrategy[list[int]]:
    """Token ids of one prompt, at least one."""
    return st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=max_length)


def prompt_batches(vocab_size: int, max_prompts: int = 4, max_length: int = 12) -> st.SearchStrategy[list[list[int]]]:
    """Prompts of ragged lengths, at least one; equal ones occur."""
    return st.lists(prompts(vocab_size, max_length), min_size=1, max_size=max_prompts)


@st.composite
def layer_specs(draw: st.DrawFn) -> LayerSpec:
    """An attention layer: grouped heads or not, odd and different dimensions, with and without window and soft-cap."""
    num_kv_heads = draw(st.integers(1, 3))
    return LayerSpec(
        num_qo_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        key_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
        scale=draw(st.sampled_from([1.0, 0.125, 0.37])),
        sliding_window=draw(st.none() | st.integers(1, 9)),
        softcap=draw(st.sampled_from([None, None, 1.5, 30.0])),
    )


def kv_layers(max_layers: int = 3) -> st.SearchStrategy[tuple[LayerSpec, ...]]:
    """The layers of a model, each with rules of its own."""
    return st.lists(layer_specs(), min_size=1, max_size=max_layers).map(tuple)


@st.composite
def drafts(draw: st.DrawFn, budget: Seq[int], vocab_size: int) -> Draft:
    """A draft of one chain per row, each within its budget, empty ones included."""
    ids = st.integers(0, vocab_size - 1)
    return Draft.from_chains([draw(st.lists(ids, max_size=limit)) for limit in budget])


def scripts(max_draft: int = 6) -> st.SearchStrategy[list[tuple[int, list[int]]]]:
    """Scripts of `ScriptedDrafter`: how many right tokens, then which others."""
    rubbish = st.lists(st.integers(0, 1000), max_size=max_draft)
    return st.lists(st.tuples(st.integers(0, max_draft), rubbish), min_size=1, max_size=6)


@st.composite
def drafters(
    draw: st.DrawFn, vocab_size: int, references: Mapping[Any, Seq[int]], eos_token_ids: Seq[int] = ()
) -> Drafter:
    """Any drafter: perfect, wrong, random, EOS-injecting or scripted, with a draft length of its own.

    Args:
        vocab_size, references: see `emssd.testing.drafters.ChainDrafter`.
        eos_token_ids: without any, EOS is not injected.
    """
    num_tokens, seed = draw(st.integers(0, 6)), draw(st.integers(0, 2**16))
    choices = ["scripted", "random", "rubbish", "perfect", "wrong"] + ["eos"] * bool(eos_token_ids)
    match draw(st.sampled_from(choices)):
        case "random":
            return RandomDrafter(vocab_size, num_tokens, references, seed=seed)
        case "rubbish":
            return RandomDrafter(vocab_size, num_tokens, seed=seed)
        case "perfect":
            return PerfectDrafter(vocab_size, num_tokens, references)
        case "wrong":
            return WrongDrafter(vocab_size, num_tokens, references)
        case "eos":
            return EosDrafter(eos_token_ids, vocab_size, num_tokens, references, seed=seed)
    return ScriptedDrafter(draw(scripts()), vocab_size, num_tokens, references)


def policies(max_draft: int = 6) -> st.SearchStrategy[BudgetPolicy]:
    """Any budget policy: fixed, or one that allots and trims at will."""
    length = st.integers(0, max_draft)
    scripted = st.lists(st.tuples(length, length), min_size=1, max_size=8).map(ScriptedBudget)
    return st.none().map(FixedBudget) | length.map(FixedBudget) | scripted


def step_histories(
    num_rows: int, max_steps: int = 6, max_drafted: int = 7
) -> st.SearchStrategy[list[list[tuple[int, int]]]]:
    """Decoding steps: of each step, per row, how many tokens are drafted and how many of them are accepted."""
    row = st.integers(0, max_drafted).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
    step = st.lists(row, min_size=num_rows, max_size=num_rows)
    return st.lists(step, min_size=1, max_size=max_steps)
