"""Arithmetic of one distribution over the vocabulary: draw from it, take a token out, take what is left of it.

Random numbers are hashes of the row, of their purpose, and of how many tokens the row has. So a step that is done
again, after a failure or a preemption, draws the same numbers. No step draws those of another.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Literal

import torch

from emssd.sampling.noise import hash_of, noise_state

__all__ = ["Uniform", "choose", "excess", "number", "stream_key", "uniforms", "without"]

Uniform = Any
"""A number in [0, 1): a float, or in tests an interval that knows its length."""

Purpose = Literal["draft", "verify", "check"]
"""Drafts are drawn with other numbers than they are verified with, and results are checked with others still."""


def stream_key(key: int, purpose: Purpose, num_tokens: int) -> int:
    """64 bits for one step of a row with this `noise_key`, which has `num_tokens` before the step."""
    return hash_of(f"{key}/{purpose}/{num_tokens}")


def uniforms(key: int, purpose: Purpose, num_tokens: int) -> Callable[[], float]:
    """Gives the next number of [0, 1), a multiple of 2^-53, each time that it is called; see `stream_key`."""
    stream, places = stream_key(key, purpose, num_tokens), count()
    return lambda: (noise_state(stream, next(places)) >> 11) * 2.0**-53


def number(value: Any) -> Any:
    """A single entry of a tensor as a number of Python's; other numbers as they are."""
    return value.item() if isinstance(value, torch.Tensor) else value


def choose(probs: torch.Tensor, uniform: Uniform) -> int:
    """The token that `uniform` falls upon if the probabilities ``[vocab]``, which add up to 1, are laid end to end.

    0 if they are all NaN, as of a model that overflowed.
    """
    token = min(int((probs.cumsum(0) <= uniform).sum()), len(probs) - 1)
    while token and not probs[token] > 0:  # the sum, or its order on a device, was rounded
        token -= 1
    return token


def without(probs: torch.Tensor, token: int) -> torch.Tensor:
    """``[vocab]`` the same without `token`, adding up to 1 again; zeros if nothing else was possible."""
    rest = probs * 1
    rest[token] = 0
    mass = number(rest.sum())
    return rest / mass if mass > 0 else rest


def excess(alpha: Any, probs: torch.Tensor, draft: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """By how much ``alpha · probs`` is above `draft`, ``[vocab]``: the sum, and the distribution in proportion to it.

    Where it is nowhere above, the sum is 0 and the distribution is `probs`.
    """
    above = (alpha * probs - draft).clip(min=0)
    mass = number(above.sum())
    return mass, above / mass if mass > 0 else probs
