"""Trees drawn from a draft's distributions without replacement, level by level (Jeon et al. 2024, arXiv 2402.14160).

A level is extended for all rows after one call of the draft model, whose distributions `extend_beam` takes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch

from emssd.attention.trees import Parents
from emssd.errors import DraftError

__all__ = ["Beam", "Drawn", "beam_at", "extend_beam"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The `Draft.extra` of a row whose tokens were drawn as `emssd_residual` says. A wrong `q` changes the law.

    Attributes:
        q: ``[1 + n]`` after the row's newest token and after each node of its tree, the distribution ``[vocab]`` that
            its children were drawn from, or any tensor if it has none. Nodes stand in the order of their drawing.
    """

    q: tuple[torch.Tensor, ...]

    def pick(self, nodes: Seq[int]) -> Drawn:
        """See `DraftExtra`."""
        return Drawn((self.q[0], *(self.q[node + 1] for node in nodes)))

    def check(self, tree: Parents, vocab_size: int) -> None:
        """See `DraftExtra`: there is a distribution after each node that has children."""
        if len(self.q) != 1 + len(tree):
            raise DraftError(
                f"its q has {len(self.q)} distributions for a row of {len(tree)} tokens; give one behind the newest "
                f"token, and one behind each of its own"
            )
        for q in (self.q[parent + 1] for parent in {*tree}):
            if q.shape != (vocab_size,) or not q.is_floating_point():
                raise DraftError(
                    f"its q has a tensor of shape {list(q.shape)} and {q.dtype} behind a token with children; give "
                    f"{vocab_size} probabilities"
                )
            if not q.sum().isfinite():
                raise DraftError(f"its q has NaN or inf behind a token with children; give {vocab_size} probabilities")


class Beam(NamedTuple):
    """The deepest level of a tree that `extend_beam` draws.

    Attributes:
        nodes: ``[r]`` of the level, by arrival.
        arrivals: ``[r]`` when each arrives, if every sequence of tokens arrives after an exponential time whose rate is
            its probability. A prefix arrives with the first of its sequences.
        probs: ``[r]`` of the way to each node.
    """

    nodes: tuple[int, ...]
    arrivals: torch.Tensor
    probs: torch.Tensor


def beam_at(node: int, device: torch.device | str = "cpu") -> Beam:
    """`node` alone, which has arrived."""
    return Beam((node,), torch.zeros(1, device=device).double(), torch.ones(1, device=device).double())


def extend_beam(
    beam: Beam, q: torch.Tensor, width: int, noise: torch.Tensor, start: int = 0
) -> tuple[list[tuple[int, int]], Beam]:
    """One level of RSD-S: of all continuations of the beam's nodes, the first `width` to arrive.

    These are stochastic beam search's (Kool et al. 2019, arXiv 1903.06059), whose Gumbel is minus the logarithm of an
    arrival. Conditioned on when the parent arrived, one child arrives with it, and the others as much later as in an
    exponential race of their own.

    Args:
        q: ``[r, vocab]`` the distribution after each node.
        noise: ``[r, vocab]`` independent standard exponentials, above 0; not those of other levels or steps.
        start: the number of the first new node.

    Returns:
        The parent and the token of each new node, and their beam.
    """
    probs = beam.probs[:, None] * q.double()
    times = torch.where(probs > 0, noise / probs, torch.inf)
    arrivals = beam.arrivals[:, None] + (times - times.amin(dim=1, keepdim=True))
    first = arrivals.flatten().topk(min(width, arrivals.numel()), largest=False)
    indices = first.indices[first.values < torch.inf]  # not NaN either, as where nothing can follow
    edges = [(beam.nodes[index // q.shape[1]], index % q.shape[1]) for index in indices.tolist()]
    nodes = tuple(range(start, start + len(edges)))
    return edges, Beam(nodes, arrivals.flatten()[indices], probs.flatten()[indices])
