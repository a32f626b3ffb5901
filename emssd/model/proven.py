"""A program that is kept on disk is taken only if it computes what its module does, and is compiled again if not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from emssd.errors import CompileError
from emssd.model import tracing
from emssd.native import Entry, entry

__all__ = ["difference", "proven"]

logger = logging.getLogger("emssd")


def proven(kind: str, key: str, write: Callable[[Path], None], take: Callable[[Entry], str | None]) -> Entry:
    """The program of that key, once more compiled if what is there is another module's.

    Args:
        kind, key, write: as `emssd.native.entry` takes them.
        take: loads what is found, and says why it is not the program, or ``None``. Reading something else raises almost
            anything, which is a reason too.

    Raises:
        CompileError: it is not right, though it was just compiled.
    """

    def why_wrong(found: Entry) -> str | None:
        try:
            return take(found)
        except Exception as error:
            return f"{type(error).__name__}: {tracing.first_line(error)}"

    found = entry(kind, key, write)
    wrong = why_wrong(found)
    if wrong is not None and not found.new:
        logger.warning("%s is not the program of this model (%s), and is compiled again", found.folder, wrong)
        found = entry(kind, key, write, replace=True)
        wrong = why_wrong(found)
    if wrong is not None:
        raise CompileError(f"{found.folder} is not the program of this model, though it was just compiled: {wrong}")
    return found


def difference(got: torch.Tensor, right: torch.Tensor) -> float:
    """The largest, in standard deviations of what is right; NaN if there is any, so ask whether it is small enough."""
    got, right = got.double(), right.double()
    return float((got - right).abs().max() / right.std().clamp_min(1e-12))
