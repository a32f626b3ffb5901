"""What the GPU benchmark measures: the machine's rates, a verification step and its kernels, decoding by emssd."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from emssd_flashinfer import FlashInferConfig
from emssd_padded import PaddedConfig
from emssd_replay import ReplayConfig
from emssd_replay.drafter import ReplayDrafter
from gpu_models import continuation

from emssd.attention import AttentionBackend, PagedBackend
from emssd.decoding.engine import Engine
from emssd.decoding.scheduler import ContinuousScheduler, StaticScheduler
from emssd.drafting import Draft, Drafter
from emssd.errors import PluginError
from emssd.model import CausalLMRunner, TargetModel
from emssd.model.costs import Costs
from emssd.plugins.registry import Registry
from emssd.sequences import Batch, Request
from emssd.simulate.recording import logged_steps
from emssd.testing.drafters import RandomDrafter
from emssd.testing.paged import ReferenceKernels, rerun

__all__ = ["DRAFTED", "decode", "make_backend", "profile_step", "prompts", "rates", "timeline", "verify_step"]

DRAFTED = 7  # tokens, as the paper's LLMA copies


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median over `repeats` calls, each waited for, after three that are not counted."""
    seconds = []
    for _ in range(3):
        function()
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def rates(device: torch.device, dtype: torch.dtype, *, large: bool) -> dict[str, float]:
    """Bytes per second of a copy (read and written ones) and operations per second of a matrix product.

    `large`: the copy is of 4 GiB, far beyond any cache, and the product of 8192³; else small ones.
    """
    source = torch.ones(2**32 if large else 2**22, dtype=torch.uint8, device=device)
    target, size = torch.empty_like(source), 8192 if large else 256
    left = torch.randn(size, size, device=device).to(dtype)
    return {
        "bytes_per_second": 2 * source.numel() / median_seconds(lambda: target.copy_(source), device, 10),
        "flops_per_second": 2 * size**3 / median_seconds(lambda: left @ left, device, 10),
    }


def make_backend(name: str, target: TargetModel, batch: int, **options: Any) -> AttentionBackend:
    """``flashinfer``, ``flashinfer-eager``, ``padded`` or ``ragged``; without a GPU, FlashInfer's kernels are replaced.

    A replaced run shows that this program works, and nothing about speed. `options` are those of ``flashinfer``.

    Raises:
        PluginError: it cannot serve the model.
    """
    backend: AttentionBackend
    if name.startswith("flashinfer") and target.device.type != "cuda":
        kernels = ReferenceKernels(capture=rerun if name == "flashinfer" else None)
        backend = PagedBackend(kernels, memory_fraction=0.8)
    elif name.startswith("flashinfer"):
        config = FlashInferConfig(cuda_graphs=name == "flashinfer", **options)
        backend = Registry().find("backend", "flashinfer").build(config)
    elif name == "padded":
        backend = Registry().find("backend", "padded").build(PaddedConfig())
    else:
        spec = Registry().find("backend", name)
        backend = spec.build(spec.config())
    spec = target.kv_cache_spec(batch)
    if reasons := backend.unsupported(spec):
        raise PluginError(f"backend {name}: {'; '.join(reasons)}")
    backend.allocate(spec)
    return backend


def prompts(batch: int, context: int, vocab_size: int) -> list[list[int]]:
    """Random prompts of one length, the same in every run."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(3, vocab_size, (batch, context), generator=generator).tolist()  # type: ignore[no-any-return]


def verify_step(
    target: TargetModel, name: str, batch: int, tokens: int, context: int, repeats: int
) -> dict[str, float]:
    """Seconds of one step that verifies ``tokens - 1`` drafted tokens per row, from scheduling to learning.

    A model with random weights accepts hardly any of them, so the rows grow by a token in each step, up to `context`.
    """
    engine = _stepping(target, make_backend(name, target, batch), batch, tokens, context - repeats - 4)
    with logged_steps(engine) as steps:
        seconds = median_seconds(engine.step, target.device, repeats)
    engine.clear()
    medians = {
        f"{part}_seconds": statistics.median(step.seconds[part] for step in steps[-repeats:])
        for part in ("plan", "forward", "verify")
    }
    return {"seconds": seconds, **medians, **dataclasses.asdict(Costs.of(target))}


def profile_step(
    target: TargetModel, name: str, batch: int, tokens: int, context: int, repeats: int, **options: Any
) -> dict[str, Any]:
    """Where a step of `verify_step` spends its time: the median without the profiler, then what the device did.

    Without a GPU, what the host did.

    Args:
        options: of the backend ``flashinfer``.
    """
    backend = make_backend(name, target, batch, **options)
    engine = _stepping(target, backend, batch, tokens, context - repeats - _PROFILED - 4)
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


_PROFILED = 5  # steps


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


def _stepping(target: TargetModel, backend: AttentionBackend, batch: int, tokens: int, begin: int) -> Engine:
    """An engine whose prompts of `begin` tokens are computed, and whose next steps verify `tokens` per row."""
    begin = max(1, begin)
    engine = Engine(
        CausalLMRunner(target, backend),
        _Fives(tokens - 1),
        scheduler=ContinuousScheduler(batch, max_step_tokens=batch * begin),  # all prompts in one step
    )
    for i, ids in enumerate(prompts(batch, begin, target.vocab_size)):
        engine.add(Request(str(i), tuple(ids), target.max_model_len - begin))
    with logged_steps(engine) as steps:
        while not steps or steps[-1].is_prefill:
            engine.step()
    return engine


class _Fives(Drafter):
    """Drafts the same token over and over."""

    def __init__(self, length: int) -> None:
        self.num_speculative_tokens = length

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.from_chains([5] * limit for limit in budget)


def decode(
    target: TargetModel, name: str, batch: int, context: int, new: int, acceptance_length: float | None
) -> dict[str, Any]:
    """Tokens/s of emssd: greedy, or with a replay at `acceptance_length`. The first run warms up and is not counted."""
    texts = prompts(batch, context, target.vocab_size)
    expected = [tuple(continuation(text, new, target.vocab_size)) for text in texts]
    backend = make_backend(name, target, batch)
    for _ in range(2):  # the same steps twice, so that the second run finds every graph recorded
        engine = Engine(
            CausalLMRunner(target, backend),
            _drafter(target, acceptance_length),
            batch_size=batch,
            scheduler=StaticScheduler(batch),
        )
        outputs = engine.generate(texts, new, ignore_eos=True)
    metrics = engine.report.metrics()
    return {
        "tokens_per_second": metrics["decode_tokens_per_second"],
        "end_to_end": metrics["tokens_per_second"],
        "acceptance_length": metrics["mean_acceptance_length"],
        "padding_per_new_token": metrics["padding_per_new_token"],
        "seconds": metrics["seconds"],
        "kv_peak_bytes": metrics["kv_peak_bytes"],
        "equal_rows": sum(out.token_ids == right for out, right in zip(outputs, expected, strict=True)),
    }


def _drafter(target: TargetModel, acceptance_length: float | None) -> Drafter:
    if acceptance_length is None:
        return RandomDrafter(target.vocab_size, 0)
    config = ReplayConfig(p=_probability(acceptance_length), num_speculative_tokens=DRAFTED)
    return ReplayDrafter(config, target.vocab_size)


def _probability(acceptance_length: float) -> float:
    """``p`` with ``1 + p + … + p^DRAFTED = τ``, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        reached = sum(middle**power for power in range(DRAFTED + 1))
        low, high = (middle, high) if reached < acceptance_length else (low, middle)
    return high
