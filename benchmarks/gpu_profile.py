"""The time of a verification step by operation, from PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from gpu_measure import make_backend, median_seconds, stepping, synchronize

from emssd.model import TargetModel

__all__ = ["profile_step", "timeline"]

_PROFILED = 5  # steps


def profile_step(
    target: TargetModel, name: str, batch: int, tokens: int, context: int, repeats: int, **options: Any
) -> dict[str, Any]:
    """Profile a step of `verify_step`: the median without the profiler, then what the device did.

    Without a GPU, what the host did.

    Args:
        options: of the backend ``flashinfer``.
    """
    backend = make_backend(name, target, batch, **options)
    engine = stepping(target, backend, batch, tokens, context - repeats - _PROFILED - 4)
    seconds = median_seconds(engine.step, target.device, repeats)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        for _ in range(_PROFILED):
            engine.step()
        synchronize(target.device)
    engine.clear()
    kind = torch.profiler.DeviceType.CUDA if target.device.type == "cuda" else torch.profiler.DeviceType.CPU
    intervals = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == kind
    ]
    return {"seconds": seconds, **timeline(intervals, _PROFILED)}


def timeline(intervals: Iterable[tuple[str, float, float]], steps: int) -> dict[str, Any]:
    """Seconds per step in which the device worked and in which it waited, launches, and the costliest kernels.

    Args:
        intervals: name, start and end of each kernel and copy, in microseconds; they may overlap.
        steps: how many steps they are of.
    """
    busy, reached, first = 0.0, float("-inf"), None
    kernels: dict[str, list[float]] = {}
    for name, start, end in sorted(intervals, key=lambda interval: interval[1]):
        first = start if first is None else first
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        kernels.setdefault(name, []).append(end - start)
    span = 0.0 if first is None else reached - first
    costly = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:25]
    return {
        "busy_seconds": busy / steps / 1e6,
        "idle_seconds": (span - busy) / steps / 1e6,
        "launches": sum(map(len, kernels.values())) / steps,
        "kernels": [
            {"name": name, "per_step": len(times) / steps, "seconds": sum(times) / steps / 1e6}
            for name, times in costly
        ],
    }
