"""Trees drawn from the draft model's distributions without replacement: what `residual` sampling asks for.

RSD-C and RSD-S of Jeon et al. 2024 (arXiv 2402.14160), drawn level by level for all rows, as `emssd_residual.drafts`
does it for one. How many nodes a row may have is known before the first of them is drawn, and nodes stand in the order
in which they are drawn. So nothing is left out for what it is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from emssd.attention.packed import on_device
from emssd.decoding.choosing import drawn_nodes
from emssd.draft_models.growing_tree import Expansion, GrowingTree, Level
from emssd.draft_models.models import ModelDrafter
from emssd.draft_models.shapes import Shape, StaticShape
from emssd.drafting import Draft
from emssd.model import ModelRunner
from emssd.sampling.choice import Node, alike, probabilities, scores_of
from emssd.sampling.noise import exponentials, noise_state
from emssd.sequences import Batch, Row
from emssd_residual.distributions import stream_key
from emssd_residual.drafts import Beam, Drawn, beam_at, extend_beam

__all__ = ["BeamShape", "ChildrenShape", "SampledDrafter", "SampledShape"]

_NONE = torch.empty(0)  # after nodes without children


class ChildrenShape(StaticShape):
    """RSD-C: every node of level ``d`` has ``expansion[d]`` children.

    The first tokens to arrive in an exponential race are drawn without replacement, one after the other (Kool et al.
    2019, arXiv 1903.06059, §2).
    """

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        return [] if _is_full(tree) else super().expand(tree, frontier)


class BeamShape(Shape):
    """RSD-S: `depth` levels of `width` nodes each, drawn as sequences without replacement."""

    def __init__(self, width: int, depth: int) -> None:
        self.width, self.depth, self.num_nodes = width, depth, width * depth

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        return [] if _is_full(tree) else [(node, range(self.width)) for node in frontier]

    def most_cached(self, num_nodes: int, depth: int) -> int:
        return min(self.width, num_nodes - 1) * max(0, depth - 1)


SampledShape = ChildrenShape | BeamShape


@dataclass(slots=True)
class _Drawing:
    """The deepest level of a tree while it is drawn, if that is a beam; by node, what its children were drawn from."""

    beam: Beam
    q: dict[int, torch.Tensor] = field(default_factory=dict)


class SampledDrafter(ModelDrafter):
    """Draws trees, and tells the distributions that they were drawn from, for rows with `residual` sampling.

    What it draws is a function of the row's seed, its id, its tokens, and the most nodes that it may have. Other rows
    get the tokens that are most probable, with the target's noise where there is some, in trees of the same shape.

    Args:
        runner: the draft model; its KV cache takes trees if `shape` has any.
        vocab_size: the target's; ids beyond it are never drafted.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, shape: SampledShape) -> None:
        super().__init__(runner, vocab_size, shape)
        self._drawn: dict[str, _Drawing] = {}  # of the draft that is being made

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._drawn = {}
        draft, extra = super().propose(batch, budget), list[Drawn | None]()
        for row, length in zip(batch, draft.lengths, strict=True):
            q = self._drawn[row.request_id].q if length and _is_residual(row) else None
            extra.append(None if q is None else Drawn(tuple(q.get(node, _NONE) for node in range(-1, length))))
        self._drawn = {}
        return replace(draft, confidence=None, extra=tuple(extra) if any(extra) else None)

    def node_of(self, row: Row) -> Node:
        if not _is_residual(row):
            return super().node_of(row)
        return self._with_known_bias(next(drawn_nodes(row, Draft.empty(1), 0)))

    def _grow(self, level: Level, logits: torch.Tensor) -> None:
        sizes = [len(expansions) for _, expansions in level]
        parts = torch.split_with_sizes(self._distributions(logits, self._nodes(level)), sizes)
        for (row, expansions), q in zip(level, parts, strict=True):
            nodes, start = [node for node, _ in expansions], len(row.tree.token_ids)
            drawing = self._drawn.setdefault(row.request_id, _Drawing(beam_at(-1, q.device)))
            drawing.q.update(zip(nodes, q, strict=True))
            noise, width = self._noise(row.node, nodes, q), len(expansions[0][1])
            if isinstance(self.shape, BeamShape):
                beam, number = drawing.beam, len(nodes)
                assert beam.nodes[:number] == tuple(nodes), "the first nodes of the beam are expanded"
                beam = Beam(beam.nodes[:number], beam.arrivals[:number], beam.probs[:number])
                edges, drawing.beam = extend_beam(beam, q, width, noise, start)
            else:
                edges = []
                for node, line, arrivals in zip(nodes, q.unsqueeze(1), noise.unsqueeze(1), strict=True):
                    edges += extend_beam(beam_at(node, q.device), line, width, arrivals)[0]
            row.tree.add_level([(parent, 0, token, 0.0) for parent, token in edges])  # all alike, to stay in order

    def _noise(self, origin: Node, nodes: Seq[int], q: torch.Tensor) -> torch.Tensor:
        """``[r, vocab]`` what the race after each of `nodes` is run with, in the tree that begins at `origin`."""
        if not origin.params.is_residual:
            return torch.ones(len(nodes), self._vocab_size, dtype=q.dtype, device=q.device)
        stream = stream_key(origin.key, "draft", origin.position)
        return exponentials([noise_state(stream, node + 1) for node in nodes], self._vocab_size, q.device)

    def _distributions(self, logits: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
        """``[n, vocab]`` float64, what follows each of `nodes`, with 0 for ids that only the target knows."""
        q = torch.zeros(len(nodes), self._vocab_size, dtype=torch.float64, device=logits.device)
        for lines in alike(nodes, range(len(nodes)), self._vocab_size):
            index, some = on_device(lines, logits.device), [nodes[line] for line in lines]
            is_residual, part = some[0].params.is_residual, logits[index]
            shares = probabilities(part, some) if is_residual else scores_of(part, some).softmax(dim=-1)
            q[index, : logits.shape[1]] = shares
        return q


def _is_full(tree: GrowingTree) -> bool:
    """Whether further nodes would be left out: what is drawn later stands later."""
    return len(tree.token_ids) >= tree.num_nodes


def _is_residual(row: Row) -> bool:
    return row.request.sampling is not None and row.request.sampling.is_residual
