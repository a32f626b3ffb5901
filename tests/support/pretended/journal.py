"""`Journal`: what happened on a pretended device, and `Graph`: what was recorded of it."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["DeviceMixError", "Graph", "Journal", "Note"]

_PASSED_OVER = (
    *(str(Path(str(package.__file__)).parent) for package in (torch, sys.modules[__package__])),
    contextlib.__file__,
)


class DeviceMixError(RuntimeError):
    """An operation takes tensors of the host and of the device, which a GPU does not."""


class Note(NamedTuple):
    """Something that happened, and where: file and line of the code that did it, PyTorch's own passed over."""

    what: str
    where: str


class Journal:
    """The record of a device.

    Attributes:
        illegal: what a CUDA graph cannot record, and was done while one was recorded.
        recording: what the graph that is being recorded does; ``None`` if there is none.
    """

    def __init__(self) -> None:
        self.waits: list[Note] = []
        self.illegal: list[Note] = []
        self.recording: list[Callable[[], object]] | None = None
        self.made: list[weakref.ref[torch.Tensor]] = []
        self._depth = 0  # of kernels that stand for compiled ones
        self._pinned: dict[int, torch.Tensor] = {}  # by address of their storage
        self._sent: list[tuple[torch.Tensor, torch.Tensor]] = []  # memory of the host, and what is to arrive there

    @property
    def in_kernel(self) -> bool:
        """Whether code runs that stands for a compiled kernel. It may read anything."""
        return self._depth > 0

    def waited(self, what: str) -> None:
        """The host waited for the device: what was sent to it is there."""
        for target, values in self._sent:
            target.copy_(values)
        self._sent.clear()
        if not self.in_kernel:
            self.waits.append(Note(what, _where()))
            self.not_in_capture(what)

    def not_in_capture(self, what: str) -> None:
        """Something was done that a CUDA graph cannot record."""
        if self.recording is not None and not self.in_kernel:
            self.illegal.append(Note(what, _where()))

    def copied_to_device(self, source: torch.Tensor, what: str, non_blocking: bool) -> None:
        """A tensor of the host was copied to the device."""
        if source.numel() == 0:
            return
        if not non_blocking:
            self.waited(f"{what} to the device, blocking")
        else:
            self.not_in_capture(f"{what} to the device" + ("" if self.is_pinned(source) else ", of pageable memory"))

    def copied_to_host(self, target: torch.Tensor | None, what: str, non_blocking: bool) -> None:
        """A tensor of the device was copied to `target`, or to new memory of the host, which is pageable."""
        if not (non_blocking and target is not None and self.is_pinned(target)):  # else a graph can record it
            self.waited(f"{what} to the host" + (", into pageable memory" if non_blocking else ""))

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy to `target`, on the host, was launched. Until the host waits, nothing of use is there."""
        self._sent.append((target, source.clone()))
        target.fill_(-1)

    def launched(self, again: Callable[[], object]) -> None:
        """A kernel was launched; `again` does what a replay of it does."""
        if self.recording is not None and not self.in_kernel:
            self.recording.append(again)

    def kernel(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function`, which stands for one compiled kernel. A replay runs it again, with the same tensors."""
        result = self.unnoted(function, *args)
        self.launched(lambda: self.unnoted(function, *args))
        return result

    def unnoted(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function`, and note nothing of what it does."""
        self._depth += 1
        try:
            return function(*args)
        finally:
            self._depth -= 1

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that the memory of `tensor` is pinned."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in pinned memory."""
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in self._pinned


class Graph:
    """A CUDA graph: operations, and what they gave. It is its own capture; all graphs of the `pool` share memory."""

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


def _where() -> str:
    """File and line of the innermost code that is neither PyTorch's nor of this package."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame = frame.f_back
    return "?" if frame is None else f"{'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno}"
