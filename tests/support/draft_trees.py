"""Trees that a tiny draft model drafts, and what it finds likely after a text, without a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import torch
from emssd_testing.models import tiny_model

from emssd.draft_models import ModelDrafter
from emssd.draft_models.shapes import Shape
from emssd.drafting import Draft, Drafter
from emssd.model import TargetModel
from emssd.sequences import Batch, Row
from tests.support.draft_models import draft_model_drafter
from tests.support.trees import paths_of

VOCAB_SIZE = 11


@cache
def draft_model(architecture: str = "llama", max_model_len: int = 64) -> TargetModel:
    return TargetModel(tiny_model(architecture, seed=3, vocab_size=VOCAB_SIZE, max_model_len=max_model_len))


def make_drafter(tree: str | Shape, model: TargetModel | None = None, **spec: Any) -> ModelDrafter:
    return draft_model_drafter(model or draft_model(), tree, VOCAB_SIZE, **spec)


Node = tuple[tuple[int, ...], float]
"""The tokens on the way to a node, and how probable the draft model finds it after its parent."""


def nodes(draft: Draft, row: int) -> list[Node]:
    sure = draft.confidence or (1.0,) * len(draft.token_ids)  # chains that stay on the device tell none
    return list(zip(paths_of(draft, row), sure[draft.indptr[row] :], strict=False))


def same(left: list[Node], right: list[Node]) -> bool:
    return [way for way, _ in left] == [way for way, _ in right] and all(
        math.isclose(mine, theirs, rel_tol=1e-9) for (_, mine), (_, theirs) in zip(left, right, strict=True)
    )


def propose(drafter: Drafter, rows: Seq[Row], budget: Seq[int]) -> Draft:
    batch = Batch(tuple(rows))
    with torch.inference_mode():
        draft = drafter.propose(batch, budget)
    draft.check(batch, budget, VOCAB_SIZE, trees=True)
    return draft


@cache
def probabilities(model: TargetModel, tokens: tuple[int, ...]) -> list[float]:
    """After `tokens`, without any cache."""
    with torch.inference_mode():
        shares: list[float] = model.model(torch.tensor([tokens]), use_cache=False).logits[0, -1].softmax(-1).tolist()
    return shares


def children(model: TargetModel, prompt: Seq[int], way: tuple[int, ...], count: int) -> list[Node]:
    shares = probabilities(model, (*prompt, *way))
    best = sorted(range(len(shares)), key=lambda token: -shares[token])[:count]
    return [((*way, token), shares[token]) for token in best]
