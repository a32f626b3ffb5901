"""Arithmetic of one distribution over the vocabulary: draw from it, take a token out, take what is left of it."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Uniform", "choose", "excess", "number", "without"]

Uniform = Any
"""A number in [0, 1): a float, or in tests an interval that knows its length."""


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
