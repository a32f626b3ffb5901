"""The least time that a decode step could take on its machine, and what sets it: bytes to move, or arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from emssd.model.costs import Costs
from emssd.report.rows import Row

__all__ = ["Floor"]


@dataclass(frozen=True, slots=True)
class Floor:
    """Of a mean decode step of one run; a draft model's own work is not in it.

    Attributes:
        byte_seconds: weights and the rows' KV moved once, at the measured bandwidth.
        flop_seconds: the arithmetic of all computed tokens, at the measured rate of a large product.
        tokens_per_row: computed in a step.
        tokens_per_step: new tokens of a step.
    """

    byte_seconds: float
    flop_seconds: float
    tokens_per_row: float
    tokens_per_step: float

    @classmethod
    def of(cls, row: Row, tokens_per_row: float | None = None) -> Floor:
        """Of a run that had decode steps, as it was or with another number of tokens per row."""
        metrics, hardware = row.metrics, row.provenance["hardware"]
        steps, num_rows = metrics["decode_steps"], metrics["decode_row_steps"] / metrics["decode_steps"]
        tokens = tokens_per_row or metrics["decode_computed_tokens"] / metrics["decode_row_steps"]
        moved, flops = Costs(**row.costs).of_step(num_rows, num_rows * tokens, metrics["decode_kv_tokens"] / steps)
        seconds = moved / hardware["bytes_per_second"], flops / hardware["flops_per_second"]
        return cls(*seconds, tokens, metrics["decode_new_tokens"] / steps)

    @property
    def seconds(self) -> float:
        """Of a step: the two overlap at best."""
        return max(self.byte_seconds, self.flop_seconds)

    @property
    def bound(self) -> str:
        """What sets it: ``bytes`` or ``FLOPs``."""
        return "FLOPs" if self.flop_seconds >= self.byte_seconds else "bytes"

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second at the floor."""
        return self.tokens_per_step / self.seconds

    @property
    def arithmetic_from(self) -> int:
        """From how many tokens per row on arithmetic takes longer than memory."""
        return max(1, ceil(self.byte_seconds * self.tokens_per_row / self.flop_seconds))
