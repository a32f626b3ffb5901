"""The least time that a decode step could take on its machine, and what sets it: bytes to move, or arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from emssd.model.costs import Costs
from emssd.report.rows import Row

__all__ = ["Floor", "arithmetic_from"]


@dataclass(frozen=True, slots=True)
class Floor:
    """Of a mean decode step of one run; a draft model's own work is not in it.

    Attributes:
        byte_seconds: weights and the rows' KV moved once, at the measured bandwidth.
        flop_seconds: the arithmetic of all computed tokens, at the measured rate of a large product.
        tokens_per_step: new tokens of a step.
    """

    byte_seconds: float
    flop_seconds: float
    tokens_per_step: float

    @classmethod
    def of(cls, row: Row) -> Floor | None:
        """Of a run; ``None`` if it had no decode step."""
        steps, num_rows = row.metrics["decode_steps"], row.metrics["decode_row_steps"]
        if not steps or not num_rows:
            return None
        seconds = _seconds(row, row.metrics["decode_computed_tokens"] / num_rows)
        return cls(*seconds, row.metrics["decode_new_tokens"] / steps)

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


def arithmetic_from(row: Row) -> int | None:
    """From how many tokens per row on arithmetic takes longer than memory, at the batch size and KV lengths of `row`.

    ``None`` if it had no decode step.
    """
    if not row.metrics["decode_steps"] or not row.metrics["decode_row_steps"]:
        return None
    moving, computing_one = _seconds(row, 1)
    return max(1, ceil(moving / computing_one))


def _seconds(row: Row, tokens_per_row: float) -> tuple[float, float]:
    """Of moving the bytes of a mean decode step, and of computing so many tokens of each of its rows."""
    metrics, hardware = row.metrics, row.provenance["hardware"]
    num_rows = metrics["decode_row_steps"] / metrics["decode_steps"]
    num_kv_tokens = metrics["decode_kv_tokens"] / metrics["decode_steps"]
    moved, flops = Costs(**row.costs).of_step(num_rows, num_rows * tokens_per_row, num_kv_tokens)
    return moved / hardware["bytes_per_second"], flops / hardware["flops_per_second"]
