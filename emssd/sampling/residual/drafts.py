"""Trees drawn from a draft's distributions without replacement, level by level (Jeon et al. 2024, arXiv 2402.14160).

A level is extended for all rows after one call of the draft model, whose distributions `extend_beam` takes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

__all__ = ["Beam", "SampledTree", "extend_beam"]


@dataclass(slots=True)
class SampledTree:
    """A tree while it is drawn, and all that its verification needs.

    Attributes:
        token_ids, parents: ``[n]`` in the order in which nodes were drawn. Its first nodes, however many, are a tree
            that may be verified in its place.
        draft: ``[1 + n]`` after the row's newest token and after each node, the ``q [vocab]`` that its children were
            drawn from; ``[0]`` if it has none.
    """

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


@dataclass(frozen=True, slots=True)
class Beam:
    """The deepest level of a tree that `extend_beam` draws.

    Attributes:
        nodes: ``[r]`` of the level, by arrival.
        arrivals: ``[r]`` when each arrives, if every sequence of tokens arrives after an exponential time whose rate is
            its probability. A prefix arrives with the first of its sequences.
        probs: ``[r]`` of the way to each node.
    """

    nodes: tuple[int, ...] = (-1,)
    arrivals: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    probs: torch.Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.float64))


def extend_beam(tree: SampledTree, beam: Beam, rows: Seq[torch.Tensor], width: int, noise: torch.Tensor) -> Beam:
    """One level of RSD-S: of all continuations of the beam's nodes, the first `width` to arrive.

    These are stochastic beam search's (Kool et al. 2019, arXiv 1903.06059), whose Gumbel is minus the logarithm of an
    arrival. Conditioned on when the parent arrived, one child arrives with it, and the others as much later as in an
    exponential race of their own.

    Args:
        rows: ``[r]`` the ``q [vocab]`` after each.
        noise: ``[r, vocab]`` independent standard exponentials, above 0; not those of other levels or steps.
    """
    q = torch.stack(list(rows)).double()
    probs = beam.probs[:, None] * q
    times = torch.where(probs > 0, noise / probs, torch.inf)
    arrivals = beam.arrivals[:, None] + (times - times.amin(dim=1, keepdim=True))
    first = arrivals.flatten().topk(min(width, arrivals.numel()), largest=False)
    places = first.indices[first.values < torch.inf]  # not NaN either, as where nothing can follow
    nodes = []
    for place in places.tolist():
        row, token = divmod(place, q.shape[1])
        nodes.append(tree.add(beam.nodes[row], token, rows[row]))
    return Beam(tuple(nodes), arrivals.flatten()[places], probs.flatten()[places])
