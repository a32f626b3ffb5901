"""The settings of a process that plugins share, and that none may leave changed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from emssd.errors import PluginWarning

__all__ = ["process_kept"]


@contextmanager
def process_kept() -> Iterator[list[str]]:
    """Undo changes of shared settings in the body. What it yields then holds the names of these settings.

    They are PyTorch's default dtype and device and autocast, filters that make errors of warnings, and variables that
    were in the environment.
    """
    import torch

    changed, environment = list[str](), dict(os.environ)
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    autocast = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    with warnings.catch_warnings():
        before = [*warnings.filters]
        try:
            yield changed
        finally:
            new = [rule for rule in warnings.filters if rule not in before]
            if any(rule[0] == "error" and issubclass(PluginWarning, rule[2]) for rule in new):
                changed.append("warnings.filters")
            if torch.get_default_dtype() != dtype:
                torch.set_default_dtype(dtype)
                changed.append("the default dtype")
            if torch.get_default_device() != device:
                torch.set_default_device(None if device.type == "cpu" else device)
                changed.append("the default device")
            if any(torch.is_autocast_enabled(kind) != was for kind, was in autocast.items()):
                changed.append("autocast")
            for kind, was in autocast.items():
                torch.set_autocast_enabled(kind, was)
            if gone := environment.keys() - os.environ.keys():
                os.environ.update({name: environment[name] for name in gone})
                changed.append("os.environ")
