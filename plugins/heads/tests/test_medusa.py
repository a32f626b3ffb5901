"""Heads that their target always agrees with are always accepted, and with any fault in what they are fed they are not.

Oracles: plain decoding and sampling by hand, without a cache; the best of all combinations of the heads' choices, from
formulas written anew. float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_heads.config import TargetSizes
from emssd_heads.loading import Loaded
from emssd_heads.medusa.drafter import MedusaDrafter, load_medusa
from emssd_heads.options import read_trees
from emssd_heads.residual import ResidualHeads

from emssd.drafting import Draft
from emssd.errors import ConfigError
from emssd.sequences import Batch
from tests.support import right_drafters
from tests.support.heads import Weights, changed, new_folder, numbers, random_weights, refusal, write_head
from tests.support.hidden import right_states
from tests.support.perfect_medusa import SIZE, VOCAB
from tests.support.right_drafts import Trial
from tests.support.tiers import looped
from tests.support.trees import paths_of


@cache
def trial() -> Trial:
    return right_drafters.trial("medusa")


@cache
def random_heads(seed: int) -> tuple[str, Weights]:
    """Heads that know nothing, of two layers each."""
    weights = head_weights(2, VOCAB, 3, SIZE, seed)
    return write_head(new_folder(), {}, weights, "medusa_lm_head.pt"), weights


def best_combinations(by_head: list[list[float]], ways: set[tuple[int, ...]], number: int) -> list[tuple[int, ...]]:
    """The `number` most probable of the paths whose tokens have these ranks."""
    ranked = [sorted(range(VOCAB), key=lambda token, shares=shares: -shares[token]) for shares in by_head]
    products = {
        tuple(ranked[level][rank] for level, rank in enumerate(way)): math.prod(
            by_head[level][ranked[level][rank]] for level, rank in enumerate(way)
        )
        for way in ways
    }
    return sorted(products, key=lambda path: -products[path])[:number]


def all_ways(shape: str) -> set[tuple[int, ...]]:
    if shape == "static":
        return {
            way for way in read_trees("emssd_heads.medusa")["vicuna_7b_stage2"] if max(way) < VOCAB and len(way) <= 3
        }
    ranks = range(1 if shape == "chain" else VOCAB)
    return {way for depth in range(1, 4) for way in product(ranks, repeat=depth)}


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
def test_the_most_probable_combinations_are_drafted(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, weights = random_heads(0)
    engine = trial().make_engine(
        {"path": path, "tree": shape, "num_nodes": 40, "static_tree": "vicuna_7b_stage2"}, batch_size=2
    )
    propose, num_compared = MedusaDrafter.propose, 0

    def compared(self: MedusaDrafter, batch: Batch, budget: Seq[int]) -> Draft:
        nonlocal num_compared
        budget = [min(limit, (2, 40, 11, 3)[num_compared % 4]) for limit in budget]
        draft = propose(self, batch, budget)
        for at, (row, limit) in enumerate(zip(batch, budget, strict=True)):
            paths, start = paths_of(draft, at), draft.indptr[at]
            if paths:
                num_compared += 1
                (states,) = right_states(trial().target.model, row.tokens[:-1], [-1])
                by_head = [dense_logits(weights, head, states[-1], 2).softmax(0).tolist() for head in range(3)]
                ways = {way for way in all_ways(shape) if len(way) < row.num_remaining}
                assert paths == best_combinations(by_head, ways, limit)
                assert draft.confidence is not None
                sure = [by_head[len(path) - 1][path[-1]] for path in paths]
                assert list(draft.confidence[start : start + len(paths)]) == pytest.approx(sure, rel=1e-9)
        return draft

    monkeypatch.setattr(MedusaDrafter, "propose", compared)
    engine.generate(trial().prompts[:2], 14, ignore_eos=True)
    assert num_compared > 8


@pytest.mark.parametrize(("depth", "num_nodes"), [(None, 63), (2, 38), (9, 63)])
def test_a_published_tree_is_cut_to_the_levels_there_are(depth: int | None, num_nodes: int) -> None:
    tree = read_trees("emssd_heads.medusa")["mc_sim_7b_63"]
    engine = trial().make_engine({"tree": "static", "depth": depth})
    assert engine.drafting.num_speculative_tokens == sum(len(way) <= (depth or 4) for way in tree) == num_nodes


H, V, HEADS = 16, 40, 5
load = partial(load_medusa, target=TargetSizes(V, H, 9, torch.float64))
CONFIG: dict[str, Any] = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}


def head_weights(
    num_layers: int = 1, num_tokens: int = V, num_heads: int = HEADS, size: int = H, seed: int = 0
) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {}
    for h in range(num_heads):
        for layer in range(num_layers):
            shapes |= {f"{h}.{layer}.linear.weight": (size, size), f"{h}.{layer}.linear.bias": (size,)}
        shapes[f"{h}.{num_layers}.weight"] = (num_tokens, size)
    return random_weights(shapes, seed)


def dense_logits(w: Weights, head: int, x: torch.Tensor, num_layers: int = 1) -> torch.Tensor:
    for layer in range(num_layers):
        y = x @ w[f"{head}.{layer}.linear.weight"].double().T
        if f"{head}.{layer}.linear.bias" in w:
            y = y + w[f"{head}.{layer}.linear.bias"].double()
        x = x + y * torch.sigmoid(y)
    return x @ w[f"{head}.{num_layers}.weight"].double().T


def assert_same(loaded: Loaded[ResidualHeads], weights: Weights, num_layers: int = 1) -> None:
    x = numbers(3, H)
    for head in range(HEADS):
        wanted = dense_logits(weights, head, x, num_layers)
        torch.testing.assert_close(loaded.head(head, x), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_files_of_heads_alone(num_layers: int, file: str, tmp_path: Path) -> None:
    weights = {name: weight.half() for name, weight in head_weights(num_layers).items()}
    loaded = load(write_head(tmp_path, CONFIG | {"medusa_num_layers": num_layers}, weights, file))
    assert_same(loaded, weights, num_layers)
    assert loaded.described[0].startswith("5 Medusa heads (its config says 2) of")


def test_heads_within_a_whole_model(tmp_path: Path) -> None:
    weights = head_weights()
    model = {"model.embed_tokens.weight": torch.ones(V, H), "lm_head.weight": torch.ones(V, H)}
    within = {f"medusa_head.{name}": weight for name, weight in weights.items()}
    assert_same(load(write_head(tmp_path, CONFIG, model | within)), weights)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_names_of_vllm_and_fewer_tokens(prefix: str, tmp_path: Path) -> None:
    weights = {name: weight for name, weight in head_weights(num_tokens=7).items() if not name.endswith("bias")}
    other = {f"{prefix}token_map": torch.arange(7) * 5}
    for h in range(HEADS):
        other[f"{prefix}blocks.{h}.layers.0.weight"] = weights[f"{h}.0.linear.weight"]
        other[f"{prefix}lm_heads.{h}.weight"] = weights[f"{h}.1.weight"]
    loaded = load(write_head(tmp_path, {"num_heads": HEADS, "truncated_vocab_size": 7}, other))
    assert_same(loaded, weights)
    assert loaded.head.target_ids is not None
    assert loaded.head.target_ids.tolist() == [0, 5, 10, 15, 20, 25, 30]
    other[f"{prefix}token_map"] = torch.arange(7) * 7
    with pytest.raises(ConfigError, match="its token_map gives no 7 different tokens"):
        load(write_head(tmp_path, {}, other))


@looped(
    "config, change, words",
    [
        ({}, {"3.0.linear.weight": None}, "layers.3.0.linear.weight is missing"),
        ({}, {"2.1.weight": None}, "projections.2.weight is missing"),
        ({}, {f"{h}.1.weight": None for h in range(HEADS)}, "none of its weights is the vocabulary proj"),
        ({}, {"extra": torch.ones(1)}, "extra is without a place in such a head"),
        ({}, {"0.1.weight": torch.ones(V + 1, H)}, "0.1.weight (41x16 in place of 40x16) is of"),
        ({}, {"0.0.linear.weight": torch.ones(8, 8)}, "(8x8 in place of 16x16)"),
        ({"original_lm_head": True}, {}, "its heads share one vocabulary projection"),
    ],
)
def test_what_does_not_fit_is_one_sentence(config: Any, change: Any, words: str, tmp_path: Path) -> None:
    weights = changed(head_weights(), change)
    assert words in refusal(lambda: load(write_head(tmp_path, CONFIG | config, weights, "medusa_lm_head.pt")))


def test_the_authors_trees_come_along() -> None:
    trees = read_trees("emssd_heads.medusa")
    assert len(trees) == 9
    for tree in trees.values():
        assert len(tree) == 63
        assert max(map(len, tree)) <= HEADS
        assert max(map(max, tree)) == 9
