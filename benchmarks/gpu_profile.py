"""The time of a step by operation, from PyTorch's profiler, and what the host does in it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from gpu_measure import engine_of, make_backend, median_seconds, prompts, stepping, synchronize

from emssd.decoding.engine import Engine
from emssd.metrics.stats import PHASES
from emssd.model import TargetModel
from emssd.sequences import Request
from tests.support.logged_steps import logged_steps

__all__ = ["host_timeline", "profile_step", "timeline"]

_PROFILED = 5  # steps
_JOINED = 5.0  # microseconds between kernels that count as one span


def profile_step(target: TargetModel, name: str, batch: int, tokens: int, context: int, repeats: int) -> dict[str, Any]:
    """Profile a step of `verify_step`: the median without the profiler, then what the device did.

    Without a GPU, what the host did.
    """
    backend = make_backend(name, target, batch)
    engine = stepping(target, backend, batch, tokens, context - repeats - _PROFILED - 4)
    seconds = median_seconds(engine.step, target.device, repeats)
    host, device = _traced(engine)
    engine.clear()
    return {"seconds": seconds, **timeline(device or host, _PROFILED)}


def host_timeline(target: TargetModel, batch: int, context: int, repeats: int) -> dict[str, Any]:
    """Look at the host in greedy decoding steps, between which nobody waits for the device.

    Returns:
        Mean seconds of a step and of its phases; in microseconds, what one step called and when the device was busy.
    """
    engine = engine_of(target, make_backend("flashinfer", target, batch), batch, None)
    for i, ids in enumerate(prompts(batch, context, target.vocab_size)):
        engine.add(Request(str(i), tuple(ids), target.max_model_len - context))
    for _ in range(6):  # prompts, and what is recorded or tuned at first
        engine.step()
    with logged_steps(engine) as steps:
        start = time.perf_counter()
        for _ in range(repeats):
            engine.step()
        seconds = (time.perf_counter() - start) / repeats
    one_step = _one_step(engine)
    engine.clear()
    return {
        "seconds": seconds,
        "phases": {name: statistics.mean(step.seconds[name] for step in steps) for name in PHASES},
        "one_step": one_step,
    }


def _one_step(engine: Engine) -> list[tuple[float, float, str]]:
    """Begin and length in microseconds of the engine's parts, CUDA's calls and spans of a busy device in a step."""
    parts = [(engine, name) for name in ("step", "_schedule", "_verify", "_advance", "_conclude")]
    parts += [(engine.drafting, "propose"), (engine.runner, "run"), (engine.runner.backend, "plan")]
    for owner, name in parts:
        setattr(owner, name, torch.profiler.record_function(name)(getattr(owner, name)))
    names = {name for _, name in parts}
    host, device = _traced(engine)
    _, begin, end = sorted(row for row in host if row[0] == "step")[-2]
    rows = [row for row in host if row[0] in names or row[0].startswith("cu")]
    kernels = [row for row in device if row[0] not in names]  # the device has a copy of each part
    for _, start, stop in sorted(kernels, key=lambda row: row[1]):
        if rows[-1][0] == "device" and start - rows[-1][2] < _JOINED:
            rows[-1] = ("device", rows[-1][1], max(stop, rows[-1][2]))
        else:
            rows.append(("device", start, stop))
    return sorted((round(a - begin, 1), round(b - a, 1), name) for name, a, b in rows if begin <= a <= end)


def _traced(engine: Engine) -> list[list[tuple[str, float, float]]]:
    """The events of some steps, on the host and on the device: name, begin and end in microseconds."""
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        for _ in range(_PROFILED):
            engine.step()
        synchronize(engine.target.device)
    traced = [(event.device_type, event.name, event.time_range) for event in profile.events()]
    types = (torch.profiler.DeviceType.CPU, torch.profiler.DeviceType.CUDA)
    return [[(name, span.start, span.end) for kind, name, span in traced if kind == wanted] for wanted in types]


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
