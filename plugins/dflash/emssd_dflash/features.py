"""`KnownFeatures`: the features of one row whose keys and values are not computed yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["KnownFeatures"]


@dataclass(slots=True)
class KnownFeatures:
    """The features of one row.

    Attributes:
        num_cached: those of so many tokens have their KV in the head's cache.
        pieces: further ones, ``[n, hidden]``, as they came.
    """

    num_cached: int = 0
    pieces: list[torch.Tensor] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The position behind the last feature."""
        return self.num_cached + sum(map(len, self.pieces))

    def add(self, start: int, features: torch.Tensor) -> None:
        """Take in the features ``[n, hidden]`` of tokens from position `start` on."""
        assert start == self.stop, f"hidden states from position {start} on, and those before end at {self.stop}"
        self.pieces.append(features)

    def covers(self, num_tokens: int) -> bool:
        """Whether the features of the first `num_tokens` tokens are cached or can be, and no more are cached."""
        return self.num_cached <= num_tokens <= self.stop and self.stop > 0

    def new(self, num_tokens: int) -> torch.Tensor:
        """Those ``[n, hidden]`` of the first `num_tokens` tokens that are not cached."""
        self.pieces = [torch.cat(self.pieces)] if len(self.pieces) > 1 else self.pieces
        return self.pieces[0][: num_tokens - self.num_cached]

    def computed(self, num_tokens: int) -> None:
        """Those of the first `num_tokens` tokens are cached."""
        self.pieces = [self.pieces[0][num_tokens - self.num_cached :].clone()]
        self.num_cached = num_tokens
