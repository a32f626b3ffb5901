"""Numbers for `residual` sampling, as hashes of the row, of what they are for, and of how many tokens it has.

So a step that is done again, after a failure or a preemption, draws the same numbers. No step draws those of another.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from hashlib import blake2b
from itertools import count
from typing import Literal

import torch

from emssd.sampling.noise import hashed, noise_state

__all__ = ["Purpose", "exponentials", "stream_key", "uniforms"]

Purpose = Literal["draft", "verify", "check"]
"""Drafts are drawn with other numbers than they are verified with, and results are checked with others still."""


def stream_key(key: int, purpose: Purpose, num_tokens: int) -> int:
    """64 bits for one step of a row.

    Args:
        key: of the row, see `emssd.sampling.noise.noise_key`.
        num_tokens: of the row before the step.
    """
    return int.from_bytes(blake2b(f"{key}/{purpose}/{num_tokens}".encode(), digest_size=8).digest(), "little")


def uniforms(key: int, purpose: Purpose, num_tokens: int) -> Callable[[], float]:
    """Gives the next number of [0, 1), a multiple of 2^-53, each time that it is called; see `stream_key`."""
    stream, places = stream_key(key, purpose, num_tokens), count()
    return lambda: (noise_state(stream, next(places)) >> 11) * 2.0**-53


def exponentials(stream: int, places: Seq[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """``[r, vocab]`` float64 standard exponentials: ``-log(u)``, `u` being the middle of one of 2^32 equal intervals.

    Args:
        stream: of `stream_key`.
        places: ``[r]`` different numbers for different rows.
    """
    states = [noise_state(stream, place) for place in places]
    return hashed(states, vocab_size, device).double().add_(0.5).mul_(2.0**-32).log_().neg_()
