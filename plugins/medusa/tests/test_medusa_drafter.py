"""Heads that their target always agrees with are always accepted, and with any fault in what they are fed they are not.

Oracles: plain decoding and sampling by hand, without a cache; the best of all combinations of the heads' choices, from
formulas written anew. float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from emssd_medusa.drafter import MedusaDrafter

from emssd.drafters.heads.options import read_trees
from emssd.drafting import Draft
from emssd.errors import ConfigError
from emssd.sequences import Batch
from tests.support import right_drafters
from tests.support.heads import Weights, random_weights, write_head
from tests.support.hidden import right_states
from tests.support.perfect_medusa import SIZE, VOCAB
from tests.support.right_drafts import Trial
from tests.support.tiers import looped
from tests.support.tree_drafts import paths_of

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain"},
    "static": {"tree": "static"},
    "dynamic": {"tree": "dynamic", "num_nodes": 14},
}


@cache
def trial() -> Trial:
    return right_drafters.trial("medusa")


@cache
def random_heads(seed: int) -> tuple[str, Weights]:
    """Heads that know nothing, of two layers each."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(3):
        for layer in range(2):
            shapes |= {f"{head}.{layer}.linear.weight": (SIZE, SIZE), f"{head}.{layer}.linear.bias": (SIZE,)}
        shapes[f"{head}.2.weight"] = (VOCAB, SIZE)
    weights = random_weights(shapes, seed)
    return write_head(Path(mkdtemp(prefix="emssd-heads-")), {}, weights, "medusa_lm_head.pt"), weights


def probabilities(weights: Weights, tokens: list[int]) -> list[list[float]]:
    """By head, the probability of each token, from the state of the token before the newest one."""
    (states,) = right_states(trial().target.model, tokens[:-1], [-1])
    found = []
    for head in range(3):
        x = states[-1]
        for layer in range(2):
            y = weights[f"{head}.{layer}.linear.weight"].double() @ x + weights[f"{head}.{layer}.linear.bias"]
            x = x + y / (1 + torch.exp(-y))
        found.append(torch.softmax(weights[f"{head}.2.weight"].double() @ x, 0).tolist())
    return found


def best_combinations(by_head: list[list[float]], ways: set[tuple[int, ...]], number: int) -> list[tuple[int, ...]]:
    """The `number` most probable of the paths whose tokens have these ranks."""
    ranked = [sorted(range(VOCAB), key=lambda token, own=own: -own[token]) for own in by_head]
    products = {
        tuple(ranked[level][rank] for level, rank in enumerate(way)): math.prod(
            by_head[level][ranked[level][rank]] for level, rank in enumerate(way)
        )
        for way in ways
    }
    return sorted(products, key=lambda path: -products[path])[:number]


def all_ways(shape: str) -> set[tuple[int, ...]]:
    if shape == "static":
        return {way for way in read_trees("emssd_medusa")["vicuna_7b_stage2"] if max(way) < VOCAB and len(way) <= 3}
    ranks = range(1 if shape == "chain" else VOCAB)
    return {way for depth in range(1, 4) for way in product(ranks, repeat=depth)}


@pytest.mark.parametrize("shape", SHAPES)
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
                by_head = probabilities(weights, list(row.tokens))
                ways = {way for way in all_ways(shape) if len(way) < row.num_remaining}
                assert paths == best_combinations(by_head, ways, limit)
                assert draft.confidence is not None
                sure = [by_head[len(path) - 1][path[-1]] for path in paths]
                assert list(draft.confidence[start : start + len(paths)]) == pytest.approx(sure, rel=1e-9)
        return draft

    monkeypatch.setattr(MedusaDrafter, "propose", compared)
    engine.generate(trial().prompts[:2], 14, ignore_eos=True)
    assert num_compared > 8


@looped(
    ("options", "words"),
    [
        ({"path": None}, "give drafter.path=FOLDER"),
        ({"path": "./nowhere"}, "there is no such folder"),
        ({"tree": "statics"}, "drafter.tree is 'statics'; did you mean 'static'"),
        ({"static_tree": "vicuna_7b"}, "drafter.static_tree is 'vicuna_7b'; did you mean 'vicuna_7b_stage"),
        ({"static_tree": "none"}, "drafter.static_tree is 'none'; choose one of mc_sim_7b_63, "),
        ({"depth": 0}, "drafter.depth is 0; it must be at least 1"),
        ({"num_nodes": 0}, "drafter.num_nodes is 0; it must be at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        trial().make_engine(options)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("depth", "num_nodes"), [(None, 63), (2, 38), (9, 63)])
def test_a_published_tree_is_cut_to_the_levels_there_are(depth: int | None, num_nodes: int) -> None:
    tree = read_trees("emssd_medusa")["mc_sim_7b_63"]
    engine = trial().make_engine({"tree": "static", "depth": depth})
    assert engine.drafting.num_speculative_tokens == sum(len(way) <= (depth or 4) for way in tree) == num_nodes
