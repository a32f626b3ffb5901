"""`KnownStates`: the hidden states of one row that a head has not computed with, and how much of the row it has."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["KnownStates"]


@dataclass(slots=True)
class KnownStates:
    """The target's hidden states of one row, as they come; those that were used are dropped, but for the last.

    Attributes:
        num_used: the states of so many tokens were used.
        start: position of the first state that is kept.
        pieces: states ``[n, …]`` from there on, as they came.
    """

    num_used: int = 0
    start: int = 0
    pieces: list[torch.Tensor] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The position behind the last state."""
        return self.start + sum(map(len, self.pieces))

    def add(self, start: int, states: torch.Tensor) -> None:
        """Take in the states ``[n, …]`` of tokens from position `start` on."""
        assert start == self.stop, f"hidden states from position {start} on, and those before end at {self.stop}"
        self.pieces.append(states)

    def covers(self, num_tokens: int) -> bool:
        """Whether the states of a row's first `num_tokens` tokens are known, and the last of them is kept."""
        return self.start < num_tokens <= self.stop

    def new(self, num_tokens: int) -> torch.Tensor:
        """The states ``[n, …]`` of the first `num_tokens` tokens that were not used yet.

        The last of them is among these also where it was used, as after a step that failed.
        """
        self.pieces = [torch.cat(self.pieces)] if len(self.pieces) > 1 else self.pieces
        return self.pieces[0][min(self.num_used, num_tokens - 1) - self.start : num_tokens - self.start]

    def used(self, num_tokens: int) -> None:
        """Those of the first `num_tokens` tokens were used. The last of them is kept."""
        while self.start + len(self.pieces[0]) < num_tokens:
            self.start += len(self.pieces.pop(0))
        self.pieces[0] = self.pieces[0][num_tokens - 1 - self.start :].clone()
        self.start, self.num_used = num_tokens - 1, num_tokens
