"""Invalid token trees of a drafter that says that it drafts trees."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from emssd.drafting import Draft

__all__ = ["OF_TREES"]


def _grown(change: Callable[[Any, list[int]], Any]) -> Callable[..., Draft]:
    """Siblings, as many as it may draft, and their parents changed, if there are any in a step."""

    def go(own: Any, batch: Any, draft: Draft, budget: Seq[int]) -> Draft:
        siblings = Draft.from_trees([(own.rng.randrange(own.vocab_size), -1) for _ in range(most)] for most in budget)
        parents = list(siblings.parents or ())
        return replace(siblings, parents=change(own, parents) if parents else tuple(parents))

    return go


def _one(value: Callable[[Any, int, int], Any]) -> Callable[[Any, list[int]], tuple[Any, ...]]:
    """One node's parent, of the node itself and of the number of nodes in the step."""

    def change(own: Any, parents: list[int]) -> tuple[Any, ...]:
        at = own.rng.randrange(len(parents))
        return tuple(value(own, at, len(parents)) if node == at else parent for node, parent in enumerate(parents))

    return change


def _whole_step(own: Any, batch: Any, draft: Draft, budget: Seq[int]) -> Draft:
    """Chains whose parents are counted over all rows."""
    chains = Draft.from_trees([(0, -1) for _ in range(most)] for most in budget)
    starts = {start for start in chains.indptr if start < chains.indptr[-1]}
    return replace(chains, parents=tuple(-1 if at in starts else at - 1 for at in range(chains.indptr[-1])))


def _ring(own: Any, parents: list[int]) -> tuple[int, ...]:
    return tuple((node + 1) % len(parents) for node in range(len(parents)))


def _too_deep(own: Any, batch: Any, draft: Draft, budget: Seq[int]) -> Draft:
    """Chains as long as the budget, which for trees may be more than the row can still generate."""
    return Draft.from_trees([(0, node - 1) for node in range(most)] for most in budget)


def _taken_back(own: Any, batch: Any, draft: Draft, budget: Seq[int]) -> Draft:
    own.drafts_trees = False
    return Draft.from_trees([(0, -1) for _ in range(most)] for most in budget)


# Those that need a drafter which says that it drafts trees.
OF_TREES: dict[str, Callable[..., Any]] = {
    "is its own parent": _grown(_one(lambda own, node, count: node)),
    "has a later parent": _grown(_one(lambda own, node, count: own.rng.randint(node, count))),
    "has parents in a ring": _grown(_ring),
    "has a parent in another row": _whole_step,
    "has a parent below the root": _grown(_one(lambda own, node, count: own.rng.choice((-2, -node - 2, -(2**40))))),
    "has a huge parent": _grown(_one(lambda own, node, count: 2**70)),
    "has half a parent": _grown(_one(lambda own, node, count: -0.5)),
    "has no parent": _grown(_one(lambda own, node, count: None)),
    "has a parent too many": _grown(lambda own, parents: (*parents, -1)),
    "has a parent too few": _grown(lambda own, parents: tuple(parents[:-1])),
    "has parents that are a number": _grown(lambda own, parents: 7),
    "has parents of a tensor": _grown(lambda own, parents: torch.tensor(parents)),
    "grows too deep": _too_deep,
    "grows too many nodes": lambda own, batch, draft, budget: Draft.from_trees(
        [(0, -1) for _ in range(most + 1)] for most in budget
    ),
    "takes back that it drafts trees": _taken_back,
}
