"""Trees drawn from the draft model's distributions without replacement: what `residual` sampling asks for.

RSD-C and RSD-S of Jeon et al. 2024 (arXiv 2402.14160), drawn level by level for all rows, as `emssd_residual.drafts`
does it for one. How many nodes a row may have is known before the first of them is drawn, and nodes stand in the order
in which they are drawn. So nothing is left out for what it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from emssd.attention.packed import on_device
from emssd.decoding.choosing import drawn_nodes
from emssd.drafters.levels import Level
from emssd.drafters.models import ModelDrafter
from emssd.drafting import Draft
from emssd.drafting.levels import Expansion, GrowingTree
from emssd.drafting.shapes import Shape, StaticShape
from emssd.model import ModelRunner
from emssd.sampling.choice import Node, alike, probabilities, scores_of
from emssd.sampling.noise import exponentials, noise_state
from emssd.sequences import Batch, Row
from emssd_residual.distributions import stream_key
from emssd_residual.drafts import Beam, Drawn, extend_beam

__all__ = ["BeamShape", "ChildrenShape", "SampledDrafter", "SampledShape"]

_NONE = torch.empty(0)  # after nodes without children


@dataclass(slots=True)
class _Drawing:
    """By node, what its children were drawn from; and the deepest level, where that is a beam."""

    q: dict[int, torch.Tensor] = field(default_factory=dict)
    beam: Beam | None = None


class SampledShape(Shape):
    """The number of nodes of a tree, and the law by which a level is drawn."""

    @abstractmethod
    def draw(
        self, beam: Beam | None, expansions: Seq[Expansion], q: torch.Tensor, noise: torch.Tensor, start: int
    ) -> tuple[list[tuple[int, int]], Beam | None]:
        """The children of nodes of the deepest level, each its parent and its token; and the beam that they are.

        Args:
            beam: the nodes of the level; ``None`` at the origin, or where there is none.
            expansions: ``r`` nodes, in the order in which they were drawn.
            q: ``[r, vocab]`` the distribution after each.
            noise: ``[r, vocab]`` standard exponentials for each; ones give the most probable tokens.
            start: the number of the first child.
        """


class ChildrenShape(StaticShape, SampledShape):
    """RSD-C: every node of level ``d`` has ``expansion[d]`` children.

    The first tokens to arrive in an exponential race are drawn without replacement, one after the other (Kool et al.
    2019, arXiv 1903.06059, §2).
    """

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        return [] if _is_full(tree) else super().expand(tree, frontier)

    def draw(
        self, beam: Beam | None, expansions: Seq[Expansion], q: torch.Tensor, noise: torch.Tensor, start: int
    ) -> tuple[list[tuple[int, int]], Beam | None]:
        edges = list[tuple[int, int]]()
        for (node, children), row, arrivals in zip(expansions, q, noise, strict=True):
            edges += extend_beam(_beam_at(node, q.device), row[None], len(children), arrivals[None], start)[0]
        return edges, None


class BeamShape(SampledShape):
    """RSD-S: `depth` levels of `width` nodes each, drawn as sequences without replacement."""

    def __init__(self, width: int, depth: int) -> None:
        self.width, self.depth, self.num_nodes = width, depth, width * depth

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        return [] if _is_full(tree) else [(node, range(self.width)) for node in frontier]

    def most_cached(self, num_nodes: int, depth: int) -> int:
        return min(self.width, num_nodes - 1) * max(0, depth - 1)

    def draw(
        self, beam: Beam | None, expansions: Seq[Expansion], q: torch.Tensor, noise: torch.Tensor, start: int
    ) -> tuple[list[tuple[int, int]], Beam | None]:
        beam, number = beam or _beam_at(-1, q.device), len(expansions)
        first = Beam(beam.nodes[:number], beam.arrivals[:number], beam.probs[:number])
        assert first.nodes == tuple(node for node, _ in expansions), "the first nodes of the beam are expanded"
        return extend_beam(first, q, self.width, noise, start)


class SampledDrafter(ModelDrafter):
    """Draws trees, and tells the distributions that they were drawn from, for rows with `residual` sampling.

    What it draws is a function of the row's seed, its id, its tokens, and the most nodes that it may have. Other rows
    get the tokens that are most probable, with the target's noise where there is some, in trees of the same shape.

    Args:
        runner: the draft model; its KV cache takes trees if `shape` has any.
        vocab_size: the target's; ids beyond it are never drafted.
    """

    shape: SampledShape

    def __init__(self, runner: ModelRunner, vocab_size: int, shape: SampledShape) -> None:
        super().__init__(runner, vocab_size, shape)
        self._drawn: dict[str, _Drawing] = {}  # of the draft that is being made

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._drawn = {}
        draft = super().propose(batch, budget)
        extra = [self._extra(row, length) for row, length in zip(batch, draft.lengths, strict=True)]
        self._drawn = {}
        return replace(draft, confidence=None, extra=tuple(extra) if any(extra) else None)

    def node_of(self, row: Row) -> Node:
        if not _is_residual(row):
            return super().node_of(row)
        return self._with_known_bias(next(drawn_nodes(row, Draft.empty(1), 0)))

    def _extra(self, row: Row, length: int) -> Drawn | None:
        """The distributions after the newest token of `row`, and after each of the `length` nodes of its tree."""
        if not length or not _is_residual(row):
            return None
        q = self._drawn[row.request_id].q
        return Drawn(tuple(q.get(node, _NONE) for node in range(-1, length)))

    def _grow(self, level: Level, logits: torch.Tensor) -> None:
        q, place = self._distributions(logits, self._nodes(level)), 0
        for row, expansions in level:
            drawing, nodes = self._drawn.setdefault(row.request_id, _Drawing()), [node for node, _ in expansions]
            own = q[place : place + len(nodes)]
            noise, start = self._noise(row.node, nodes, own), len(row.tree.token_ids)
            edges, drawing.beam = self.shape.draw(drawing.beam, expansions, own, noise, start)
            drawing.q.update(zip(nodes, own, strict=True))
            row.tree.add_level([(parent, 0, token, 0.0) for parent, token in edges])  # all alike, to stay in order
            place += len(nodes)

    def _noise(self, origin: Node, nodes: Seq[int], q: torch.Tensor) -> torch.Tensor:
        """``[r, vocab]`` what the race after each of `nodes` is run with, in the tree that begins at `origin`."""
        if not origin.params.is_residual:
            return torch.ones(len(nodes), self._vocab_size, dtype=q.dtype, device=q.device)
        stream = stream_key(origin.key, "draft", origin.position)
        return exponentials([noise_state(stream, node + 1) for node in nodes], self._vocab_size, q.device)

    def _distributions(self, logits: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
        """``[n, vocab]`` float64, what follows each of `nodes`, with 0 for ids that only the target knows."""
        q = torch.zeros(len(nodes), self._vocab_size, dtype=torch.float64, device=logits.device)
        for places in alike(nodes, range(len(nodes)), self._vocab_size):
            index, own = on_device(places, logits.device), [nodes[place] for place in places]
            rows = logits[index]
            known = probabilities(rows, own) if own[0].params.is_residual else scores_of(rows, own).softmax(dim=-1)
            q[index, : logits.shape[1]] = known
        return q


def _is_full(tree: GrowingTree) -> bool:
    """Whether further nodes would be left out: what is drawn later stands later."""
    return len(tree.token_ids) >= tree.num_nodes


def _is_residual(row: Row) -> bool:
    return row.request.sampling is not None and row.request.sampling.is_residual


def _beam_at(node: int, device: torch.device) -> Beam:
    arrivals = torch.zeros(1, dtype=torch.float64, device=device)
    return Beam((node,), arrivals, arrivals + 1)
