"""`KnownPairs`: the features of one row that the head has not computed with, and how much of the row it has."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["KnownPairs"]


@dataclass(slots=True)
class KnownPairs:
    """The pairs of one row: pair ``i`` is the feature of token ``i`` beside token ``i + 1``.

    Attributes:
        num_cached: so many pairs have their KV in the head's cache.
        start: position of the first feature that is kept.
        pieces: features ``[n, hidden]`` from there on, as they came.
    """

    num_cached: int = 0
    start: int = 0
    pieces: list[torch.Tensor] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The position behind the last feature."""
        return self.start + sum(map(len, self.pieces))

    def add(self, start: int, features: torch.Tensor) -> None:
        """Take in the features ``[n, hidden]`` of tokens from position `start` on."""
        assert start == self.stop, f"hidden states from position {start} on, and those before end at {self.stop}"
        self.pieces.append(features)

    def covers(self, num_pairs: int) -> bool:
        """Whether the first `num_pairs` pairs can be computed, at least one of them now."""
        return self.start < num_pairs <= self.stop

    def new(self, num_pairs: int) -> torch.Tensor:
        """The features ``[n, hidden]`` of the pairs to compute, so that the first `num_pairs` are cached.

        The last of these is computed again where it is cached already, as after a step that failed: what is behind it
        is wanted.
        """
        self.pieces = [torch.cat(self.pieces)] if len(self.pieces) > 1 else self.pieces
        return self.pieces[0][min(self.num_cached, num_pairs - 1) - self.start : num_pairs - self.start]

    def computed(self, num_pairs: int) -> None:
        """The first `num_pairs` pairs are cached. The last of their features is kept."""
        self.pieces = [self.pieces[0][num_pairs - 1 - self.start :].clone()]
        self.start, self.num_cached = num_pairs - 1, num_pairs
