"""Modules that compute something else, or are listened to, in one thread and for the time of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch

__all__ = ["lock_of", "only_here", "replaced_forward"]

_LOCKS: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
_MAKING = RLock()


def lock_of(model: torch.nn.Module) -> Any:
    """The lock that engines hold for a pass of `model`; one, however many engines there are."""
    with _MAKING:
        return _LOCKS.setdefault(model, RLock())


def only_here(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in this thread, and `elsewhere` in others, which call the same modules."""
    thread = get_ident()
    return lambda *args, **kwargs: (function if get_ident() == thread else elsewhere)(*args, **kwargs)


@contextmanager
def replaced_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within, `module` computes `forward` for this thread; afterwards what it computed before.

    The caller holds the lock of its model.
    """
    own = vars(module).get("forward")
    module.forward = only_here(forward, module.forward)
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
