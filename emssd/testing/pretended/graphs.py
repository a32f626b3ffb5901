"""CUDA graphs of a pretended device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from emssd.testing.pretended.journal import Journal

__all__ = ["Graph"]


class Graph:
    """A CUDA graph: operations, and what they gave. It is its own capture, as a context manager.

    Args:
        journal: of the device.
        pool: all graphs of the device; they share memory.
    """

    def __init__(self, journal: Journal, pool: weakref.WeakSet[Graph]) -> None:
        self._journal, self._all = journal, pool
        self._operations: list[Callable[[], object]] = []
        self._made: list[weakref.ref[Any]] = []

    def __enter__(self) -> None:
        assert self._journal.recording is None, "a graph is being recorded already"
        self._journal.recording, self._journal.made = [], []

    def __exit__(self, *error: object) -> None:
        self._operations, self._made = self._journal.recording or [], self._journal.made
        self._journal.recording, self._journal.made = None, []
        self._all.add(self)

    def pool(self) -> object:
        """A name of the memory."""
        return self._all

    def replay(self) -> None:
        """Do again what was recorded. Nothing that other graphs gave is there any more."""
        for other in self._all:
            if other is not self:
                other.spoil()
        for operation in self._operations:
            operation()

    def spoil(self) -> None:
        """Fill what is left of its results with NaN."""
        for made in self._made:
            tensor = made()
            if tensor is not None and tensor.on_host.is_floating_point():
                tensor.on_host.fill_(float("nan"))
