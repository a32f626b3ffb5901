"""`PretendedCuda`: within it, PyTorch has a CUDA device that is none."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch

from tests.support.pretended.functions import Functions
from tests.support.pretended.journal import Graph, Journal, Note
from tests.support.pretended.tensor import Dispatch

__all__ = ["PretendedCuda"]


class PretendedCuda:
    """A context in which PyTorch has one CUDA device, whose tensors lie on the CPU.

    Mixed devices raise, each wait of the host is noted, and what a CUDA graph records is done again by its replays: the
    same operations on the same tensors, and nothing of Python. A copy to the host arrives when the host waits. A replay
    fills what other graphs gave with NaN, as their memory may be used again. `torch.inference_mode` is `torch.no_grad`
    within, as the two do not go together.

    Speed, memory, rounding and the order of streams are not pretended. Compiled kernels are replaced with `kernel`.
    """

    def __init__(self) -> None:
        self._journal, self._stack = Journal(), ExitStack()

    @property
    def waits(self) -> list[Note]:
        """The places where the host waited for the device; the list may be emptied."""
        return self._journal.waits

    @property
    def illegal(self) -> list[Note]:
        """The operations that a graph cannot record, and that ran while one was recorded."""
        return self._journal.illegal

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which stands for one compiled kernel: what it does on the host is not noted."""
        return lambda *args: self._journal.kernel(function, *args)

    def unnoted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which stands for code of a library that looks only at the host: nothing that it does is noted."""
        return lambda *args: self._journal.unnoted(function, *args)

    def __enter__(self) -> Self:
        journal = self._journal
        properties = SimpleNamespace(multi_processor_count=132, name="pretended", total_memory=2**37, major=9, minor=0)
        # All work on the device is done when it is launched, so only the host ever waits.
        stream = SimpleNamespace(
            synchronize=lambda: journal.waited("stream.synchronize()"), wait_stream=lambda other: None
        )
        event = SimpleNamespace(
            record=lambda stream=None: None,
            query=lambda: True,
            synchronize=lambda: journal.waited("event.synchronize()"),
        )
        pool = weakref.WeakSet[Graph]()
        pretended = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_name": lambda device=None: "pretended",
            "get_device_properties": lambda device=None: properties,
            "mem_get_info": lambda device=None: (2**32, 2**37),
            "memory_reserved": lambda device=None: 0,
            "memory_allocated": lambda device=None: 0,
            "get_rng_state": lambda *_: torch.zeros(1),
            "set_rng_state": lambda *_: None,
            "manual_seed_all": lambda *_: None,
            "synchronize": lambda *_: journal.waited("torch.cuda.synchronize()"),
            "current_stream": lambda device=None: stream,
            "Stream": lambda *_, **__: stream,
            "stream": lambda stream: nullcontext(),
            "Event": lambda *_, **__: event,
            "CUDAGraph": lambda *_: Graph(journal, pool),
            "graph": lambda graph, **_: graph,
        }
        for name, value in pretended.items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, function in (("__enter__", _enter), ("__exit__", _exit)):
            self._stack.enter_context(mock.patch.object(torch.inference_mode, name, function))
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # a wrapper cannot become a parameter's data
        self._stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        self._stack.enter_context(Functions(journal))
        self._stack.enter_context(Dispatch(journal))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _enter(mode: Any) -> None:
    mode._inference_mode_context = torch.no_grad() if mode.mode else nullcontext()
    mode._inference_mode_context.__enter__()


def _exit(mode: Any, *error: object) -> None:
    mode._inference_mode_context.__exit__(*error)
