"""Trees drawn from the draft model's distributions without replacement: what `residual` sampling asks for.

RSD-C and RSD-S of Jeon et al. 2024 (arXiv 2402.14160), drawn level by level for all rows, as `emssd.sampling.residual`
does it for one. How many nodes a row may have is known before the first of them is drawn, and nodes stand in the order
in which they are drawn. So nothing is left out for what it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
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
from emssd.sampling.choice import Node, probabilities, scores_of
from emssd.sampling.noise import exponentials, stream_key
from emssd.sampling.residual import Beam, SampledTree, extend_beam
from emssd.sequences import Batch, Row

__all__ = ["BeamShape", "ChildrenShape", "SampledDrafter", "SampledShape"]


@dataclass(slots=True)
class _Drawn:
    """The tree of a row while it is drawn, and its deepest level where that is a beam."""

    tree: SampledTree = field(default_factory=SampledTree)
    beam: Beam | None = None


class SampledShape(Shape):
    """The number of nodes of a tree, and the law by which a level is drawn."""

    @abstractmethod
    def draw(self, drawn: _Drawn, expansions: Seq[Expansion], q: torch.Tensor, noise: torch.Tensor) -> None:
        """Give nodes of the deepest level their children.

        Args:
            expansions: ``r`` nodes, in the order in which they were drawn.
            q: ``[r, vocab]`` the distribution after each.
            noise: ``[r, vocab]`` standard exponentials for each; ones give the most probable tokens.
        """


class ChildrenShape(StaticShape, SampledShape):
    """RSD-C: every node of level ``d`` has ``expansion[d]`` children.

    The first tokens to arrive in an exponential race are drawn without replacement, one after the other (Kool et al.
    2019, arXiv 1903.06059, §2).
    """

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        return [] if _is_full(tree) else super().expand(tree, frontier)

    def draw(self, drawn: _Drawn, expansions: Seq[Expansion], q: torch.Tensor, noise: torch.Tensor) -> None:
        for (node, children), row, arrivals in zip(expansions, q, noise, strict=True):
            extend_beam(drawn.tree, _beam_at(node, q.device), [row], len(children), arrivals.unsqueeze(0))


class BeamShape(SampledShape):
    """RSD-S: `depth` levels of `width` nodes each, drawn as sequences without replacement."""

    def __init__(self, width: int, depth: int) -> None:
        self.width, self.depth, self.num_nodes = width, depth, width * depth

    def expand(self, tree: GrowingTree, frontier: Seq[int]) -> list[Expansion]:
        return [] if _is_full(tree) else [(node, range(self.width)) for node in frontier]

    def most_cached(self, num_nodes: int, depth: int) -> int:
        return min(self.width, num_nodes - 1) * max(0, depth - 1)

    def draw(self, drawn: _Drawn, expansions: Seq[Expansion], q: torch.Tensor, noise: torch.Tensor) -> None:
        beam, number = drawn.beam or _beam_at(-1, q.device), len(expansions)
        first = Beam(beam.nodes[:number], beam.arrivals[:number], beam.probs[:number])
        assert first.nodes == tuple(node for node, _ in expansions), "the first nodes of the beam are expanded"
        drawn.beam = extend_beam(drawn.tree, first, list(q), self.width, noise)


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
        self._drawn: dict[str, _Drawn] = {}  # of the draft that is being made

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._drawn = {}
        draft = super().propose(batch, budget)
        q = [self._told(row, length) for row, length in zip(batch, draft.lengths, strict=True)]
        self._drawn = {}
        return replace(draft, confidence=None, q=tuple(q) if any(each is not None for each in q) else None)

    def node_of(self, row: Row) -> Node:
        if not _is_residual(row):
            return super().node_of(row)
        return self._with_known_bias(next(drawn_nodes(row, Draft.empty(1), 0)))

    def _told(self, row: Row, length: int) -> Seq[torch.Tensor] | None:
        """The distributions after the newest token of `row`, and after each of the `length` nodes of its tree."""
        if not length or not _is_residual(row):
            return None
        return tuple(self._drawn[row.request_id].tree.draft[: 1 + length])

    def _grow(self, level: Level, logits: torch.Tensor) -> None:
        q, place = self._distributions(logits, self._nodes(level)), 0
        for row, expansions in level:
            stop = place + len(expansions)
            drawn = self._drawn.setdefault(row.request_id, _Drawn())
            noise = self._noise(row.node, [node for node, _ in expansions], q)
            self.shape.draw(drawn, expansions, q[place:stop], noise)
            _take_over(row.tree, drawn.tree)
            place = stop

    def _noise(self, origin: Node, nodes: Seq[int], q: torch.Tensor) -> torch.Tensor:
        """``[r, vocab]`` what the race after each of `nodes` is run with, in the tree that begins at `origin`."""
        if not origin.params.is_residual:
            return torch.ones(len(nodes), self._vocab_size, dtype=q.dtype, device=q.device)
        stream = stream_key(origin.key, "draft", origin.position)
        return exponentials(stream, [node + 1 for node in nodes], self._vocab_size, q.device)

    def _distributions(self, logits: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
        """``[n, vocab]`` float64, what follows each of `nodes`, with 0 for ids that only the target knows."""
        found = torch.zeros(len(nodes), self._vocab_size, dtype=torch.float64, device=logits.device)
        groups: dict[Hashable, list[int]] = {}
        for place, node in enumerate(nodes):
            groups.setdefault((node.params.is_residual, node.params.processing), []).append(place)
        for places in groups.values():
            index, own = on_device(places, logits.device), [nodes[place] for place in places]
            rows = logits[index]
            known = probabilities(rows, own) if own[0].params.is_residual else scores_of(rows, own).softmax(dim=-1)
            found[index, : logits.shape[1]] = known
        return found


def _take_over(tree: GrowingTree, drawn: SampledTree) -> None:
    """Give `tree` the level that was drawn. All nodes are scored alike, so that they stay in their order."""
    first = len(tree.token_ids)
    edges = zip(drawn.parents[first:], drawn.token_ids[first:], strict=True)
    tree.add_level([(parent, 0, token, 0.0) for parent, token in edges])


def _is_full(tree: GrowingTree) -> bool:
    """Whether further nodes would be left out: what is drawn later stands later."""
    return len(tree.token_ids) >= tree.num_nodes


def _is_residual(row: Row) -> bool:
    return row.request.sampling is not None and row.request.sampling.is_residual


def _beam_at(node: int, device: torch.device) -> Beam:
    arrivals = torch.zeros(1, dtype=torch.float64, device=device)
    return Beam((node,), arrivals, arrivals + 1)
