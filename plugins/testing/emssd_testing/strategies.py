"""Hypothesis strategies for what emssd works on: attention layers, drafters, budget policies; and `Waves`."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from hypothesis import strategies as st

from emssd.attention import KVCacheSpec, LayerSpec
from emssd.drafting import BudgetPolicy, Drafter
from emssd.drafting.budget import FixedBudget
from emssd_testing.drafters import (
    PerfectDrafter,
    RandomDrafter,
    ScriptedBudget,
    TreeDrafter,
    WrongDrafter,
    any_parents,
)

__all__ = ["Waves", "drafters", "kv_layers", "policies", "trees"]


@st.composite
def layer_specs(draw: st.DrawFn) -> LayerSpec:
    """An attention layer: grouped heads or not, odd and different dimensions, some with window, soft-cap and sinks."""
    num_kv_heads = draw(st.integers(1, 3))
    num_qo_heads = num_kv_heads * draw(st.integers(1, 3))
    scores = st.sampled_from([-2.0, 0.0, 0.5, 3.0])
    return LayerSpec(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        key_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
        scale=draw(st.sampled_from([1.0, 0.125, 0.37])),
        sliding_window=draw(st.none() | st.integers(1, 9)),
        softcap=draw(st.sampled_from([None, None, 1.5, 30.0])),
        sinks=draw(st.none() | st.tuples(*[scores] * num_qo_heads)),
    )


def kv_layers() -> st.SearchStrategy[tuple[LayerSpec, ...]]:
    """The layers of a model, each with rules of its own."""
    return st.lists(layer_specs(), min_size=1, max_size=3).map(tuple)


def trees(num_nodes: int) -> st.SearchStrategy[tuple[int, ...]]:
    """The parents of any token tree of `num_nodes` nodes, see `any_parents`."""
    return st.randoms(use_true_random=False).map(lambda random: tuple(any_parents(num_nodes, random)))


@st.composite
def drafters(
    draw: st.DrawFn, vocab_size: int, references: Mapping[Any, Seq[int]], *, with_trees: bool = False
) -> Drafter:
    """Any drafter: perfect, wrong, random or of trees, with a draft length of its own."""
    num_tokens, seed = draw(st.integers(0, 6)), draw(st.integers(0, 2**16))
    of_trees = ["trees", "trees"] if with_trees else []
    match draw(st.sampled_from([*of_trees, "random", "random", "rubbish", "perfect", "wrong"])):
        case "trees":
            right, sure = draw(st.sampled_from([0.5, 0.9])), draw(st.booleans())
            return TreeDrafter(vocab_size, 2 * num_tokens, references, right=right, sure=sure, seed=seed)
        case "rubbish":
            return RandomDrafter(vocab_size, num_tokens, seed=seed)
        case "perfect":
            return PerfectDrafter(vocab_size, num_tokens, references)
        case "wrong":
            return WrongDrafter(vocab_size, num_tokens, references)
    return RandomDrafter(vocab_size, num_tokens, references, seed=seed)


def policies() -> st.SearchStrategy[BudgetPolicy]:
    """Any budget policy: fixed, or one that allots and trims at will, and perhaps ends drafts between passes."""
    length = st.integers(0, 6)
    scripts = st.lists(st.tuples(length, length), min_size=1, max_size=8)
    scripted = st.builds(ScriptedBudget, scripts, ends=st.booleans())
    return st.none().map(FixedBudget) | length.map(FixedBudget) | scripted


class Waves:
    """For tests of backends: ids stand for tokens ever fed, and each has its own query, key and value in each layer."""

    def __init__(self, spec: KVCacheSpec, seed: int) -> None:
        self._spec = spec
        self._generator = torch.Generator().manual_seed(seed)
        self._known: dict[tuple[int, str], torch.Tensor] = {}

    def qkv(self, ids: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[n, heads, dim]`` queries, keys and values of ``ids [n]``."""
        rules = self._spec.layers[layer]
        return (
            self._wave(ids, layer, "query", rules.num_qo_heads, rules.key_dim),
            self._wave(ids, layer, "key", rules.num_kv_heads, rules.key_dim),
            self._wave(ids, layer, "value", rules.num_kv_heads, rules.value_dim),
        )

    def _wave(self, ids: torch.Tensor, layer: int, what: str, heads: int, dim: int) -> torch.Tensor:
        if (layer, what) not in self._known:
            self._known[layer, what] = torch.randn(2, heads, dim, generator=self._generator, dtype=torch.float64)
        frequency, phase = self._known[layer, what].to(ids.device)
        return (1.5 * torch.sin(ids[:, None, None] * (1.0 + frequency) + phase)).to(self._spec.dtype)
