"""Trees that are drawn from any distributions for one row, and a drafter that drafts them without a model."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from emssd_residual.distributions import Uniform, choose, number, uniforms, without
from emssd_residual.drafts import Drawn, beam_at, extend_beam

from emssd.decoding.choosing import drawn_nodes
from emssd.drafting import Draft, Drafter
from emssd.sequences import Batch, Row

Behind = Callable[[Seq[int]], torch.Tensor]
"""The distribution ``q [vocab]`` that follows a text."""


def even(vocab_size: int) -> Behind:
    """Every token follows every text."""
    return lambda _: torch.full((vocab_size,), 1 / vocab_size, dtype=torch.float64)


@dataclass(slots=True)
class SampledTree:
    """A tree while it is drawn: `draft` is the ``q [vocab]`` after the newest token and each node; ``[0]`` without."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    draft: list[torch.Tensor] = field(default_factory=lambda: [torch.empty(0)])

    def add(self, parent: int, token: int, q: torch.Tensor) -> int:
        """A new node, whose token was drawn from the `q` after `parent` or from what was left of it."""
        self.draft[parent + 1] = q
        self.token_ids.append(token)
        self.parents.append(parent)
        self.draft.append(torch.empty(0))
        return len(self.token_ids) - 1


def way(tree: SampledTree, node: int) -> tuple[int, ...]:
    """The tokens from the origin to `node`."""
    return () if node < 0 else (*way(tree, tree.parents[node]), tree.token_ids[node])


def joined(trees: Seq[SampledTree | None]) -> Draft:
    """The trees of a batch as one draft; rows without one draft nothing."""
    nodes = [[] if tree is None else list(zip(tree.token_ids, tree.parents, strict=True)) for tree in trees]
    extra = tuple(None if tree is None else Drawn(tuple(tree.draft)) for tree in trees)
    return replace(Draft.from_trees(nodes), extra=extra)


BehindNodes = Callable[[SampledTree, Seq[int]], Seq[torch.Tensor]]
"""Gives the draft's distribution ``q [vocab]`` after each of the given nodes of a tree, -1 being its origin."""


def add_children(
    tree: SampledTree, node: int, q: torch.Tensor, num_children: int, uniform: Callable[[], Uniform]
) -> list[int]:
    """Draw children of `node` from ``q [vocab]``, no token twice; fewer where `q` has not as many tokens.

    Args:
        node: which of its nodes, -1 for the origin.
        uniform: gives independent numbers in [0, 1), others than those of verification and those of other steps.
    """
    drawable, children = q, list[int]()
    for _ in range(num_children):
        if not number(drawable.sum()) > 0:
            break
        token = choose(drawable, uniform())
        children.append(tree.add(node, token, q))
        drawable = without(drawable, token)
    return children


def rsd_c(behind: BehindNodes, branching: Seq[int], uniform: Callable[[], Any]) -> SampledTree:
    """RSD-C: every node of level ``i`` has ``branching[i]`` children; a chain if these are all 1."""
    tree, level = SampledTree(), [-1]
    for num_children in branching:
        rows = behind(tree, level)
        level = [
            child
            for node, q in zip(level, rows, strict=True)
            for child in add_children(tree, node, q, num_children, uniform)
        ]
    return tree


def rsd_s(behind: BehindNodes, width: int, depth: int, noise: Callable[[int], torch.Tensor]) -> SampledTree:
    """RSD-S: `depth` levels of `width` nodes each, drawn as sequences without replacement.

    Args:
        behind, width, depth: see above.
        noise: given the number of nodes of a level, the exponentials of `extend_beam`.
    """
    tree, beam = SampledTree(), beam_at(-1)
    for _ in range(depth):
        if not beam.nodes:
            break
        before, rows = beam, behind(tree, beam.nodes)
        edges, beam = extend_beam(beam, torch.stack([*rows]), width, noise(len(rows)), len(tree.token_ids))
        for parent, token in edges:
            tree.add(parent, token, rows[before.nodes.index(parent)])
    return tree


class DrawingDrafter(Drafter):
    """Draws RSD-C trees for rows with `residual` sampling, as deep as a row may go. Keeps as many nodes as it may.

    Args:
        behind: what it draws from.
        branching: children of each node, level by level.
    """

    drafts_trees = True

    def __init__(self, behind: Behind, branching: Seq[int]) -> None:
        self.num_speculative_tokens = 64
        self._behind, self._branching = behind, branching

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        draft = joined([self.tree(row) if limit else None for row, limit in zip(batch, budget, strict=True)])
        return draft.cut([min(limit, length) for limit, length in zip(budget, draft.lengths, strict=True)])

    def tree(self, row: Row) -> SampledTree | None:
        """The tree of a row; ``None`` if it is not sampled by the `residual` method."""
        params = row.request.sampling
        if params is None or not params.is_residual:
            return None
        key = next(drawn_nodes(row, Draft.empty(1), 0)).key

        def behind(tree: SampledTree, nodes: Seq[int]) -> list[torch.Tensor]:
            return [self._behind([*row.tokens, *way(tree, node)]) for node in nodes]

        branching = self._branching[: row.num_remaining - 1]
        return rsd_c(behind, branching, uniforms(key, "draft", len(row.tokens)))
