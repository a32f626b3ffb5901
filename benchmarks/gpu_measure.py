"""Measurements of the GPU benchmark: the machine's rates, a verification step, decoding by emssd."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from emssd_lab.costs import Costs
from emssd_lab.replay import ReplayConfig
from emssd_lab.replay.drafter import ReplayDrafter
from emssd_testing.drafters import PerfectDrafter, RandomDrafter

from emssd.attention import AttentionBackend, PagedBackend
from emssd.decoding.engine import Engine
from emssd.decoding.scheduler import ContinuousScheduler, StaticScheduler
from emssd.drafting import Drafter
from emssd.errors import PluginError
from emssd.hooks.registry import Registry
from emssd.model import CausalLMRunner, TargetModel
from emssd.model.load.loading import counted_on
from emssd.sequences import Request
from tests.support.logged_steps import logged_steps
from tests.support.reference_kernels import ReferenceKernels, rerun

__all__ = ["DRAFTED", "FLASHINFER", "SHAPES", "decode", "engine_of", "make_backend", "median_seconds", "prompts",
           "rates", "right_rows", "stepping", "synchronize", "verify_step"]  # fmt: skip

CONFIGS = Path(__file__).resolve().parents[1] / "conf" / "model"
SHAPES = {
    name: yaml.safe_load((CONFIGS / f"{name.replace('-', '_').replace('.', '_')}_shape.yaml").read_text())[
        "architecture"
    ]
    for name in ("opt-2.7b", "opt-6.7b", "opt-13b", "llama-3-8b", "qwen3-8b")
}
"""Configs of Transformers."""

SHAPES["tiny"] = SHAPES["opt-2.7b"] | {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 256, "vocab_size": 512,
                                       "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
DRAFTED = 7  # tokens, as the paper's LLMA copies
FLASHINFER: dict[str, dict[str, Any]] = {
    "flashinfer": {},
    "flashinfer-eager": {"cuda_graphs": False},
    "flashinfer-uncompiled": {"fused_kernels": False},
}
"""Options of the backend, by the name of what is measured."""


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


def make_backend(name: str, target: TargetModel, batch: int) -> AttentionBackend:
    """One of `FLASHINFER`, ``padded`` or ``ragged``; without a GPU, FlashInfer's kernels are replaced.

    A replaced run shows that this program works, and nothing about speed.

    Raises:
        PluginError: it cannot serve the model.
    """
    backend: AttentionBackend
    if name.startswith("flashinfer") and target.device.type != "cuda":
        recorded = FLASHINFER[name].get("cuda_graphs", True)
        kernels = ReferenceKernels(capture=rerun if recorded else None)
        backend = PagedBackend(kernels, memory_fraction=0.8)
    else:
        found = Registry().find("backend", name.partition("-")[0])
        backend = found.build(found.config(**FLASHINFER.get(name, {})))
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
    engine = stepping(target, make_backend(name, target, batch), batch, tokens, context - repeats - 4)
    with logged_steps(engine) as steps:
        seconds = median_seconds(engine.step, target.device, repeats)
    engine.clear()
    medians = {
        f"{part}_seconds": statistics.median(step.seconds[part] for step in steps[-repeats:])
        for part in ("plan", "forward", "verify")
    }
    return {"seconds": seconds, **medians, **dataclasses.asdict(Costs.of(target))}


def stepping(target: TargetModel, backend: AttentionBackend, batch: int, tokens: int, begin: int) -> Engine:
    """An engine whose prompts of `begin` tokens are computed, and whose next steps verify `tokens` per row."""
    begin = max(1, begin)
    wrong = {str(i): [5] * (target.max_model_len - begin) for i in range(batch)}
    engine = Engine(
        CausalLMRunner(target, backend),
        PerfectDrafter(target.vocab_size, tokens - 1, wrong),
        scheduler=ContinuousScheduler(batch, max_step_tokens=batch * begin),  # all prompts in one step
    )
    for i, ids in enumerate(prompts(batch, begin, target.vocab_size)):
        engine.add(Request(str(i), tuple(ids), target.max_model_len - begin))
    with logged_steps(engine) as steps:
        while not steps or steps[-1].is_prefill:
            engine.step()
    return engine


def decode(
    target: TargetModel, name: str, batch: int, context: int, new: int, acceptance_length: float | None
) -> dict[str, Any]:
    """Tokens/s of emssd: greedy, or with a replay at `acceptance_length`. The first run warms up and is not counted."""
    texts = prompts(batch, context, target.vocab_size)
    backend = make_backend(name, target, batch)
    for _ in range(2):  # the same steps twice, so that the second run finds every graph recorded
        engine = engine_of(target, backend, batch, acceptance_length)
        outputs = engine.generate(texts, new, ignore_eos=True)
    metrics = engine.report.metrics()
    return {
        "tokens_per_second": metrics["decode_tokens_per_second"],
        "end_to_end": metrics["tokens_per_second"],
        "acceptance_length": metrics["mean_acceptance_length"],
        "padding_per_new_token": metrics["padding_per_new_token"],
        "seconds": metrics["seconds"],
        "kv_peak_bytes": metrics["kv_peak_bytes"],
        "equal_rows": right_rows([[*out.token_ids] for out in outputs], texts, target.vocab_size),
    }


def right_rows(generated: list[list[int]], asked: list[list[int]], vocab_size: int) -> int:
    """The number of rows that went on with the right tokens."""
    pairs = zip(generated, asked, strict=True)
    return sum(row == counted_on(prompt[-1], len(row), vocab_size) for row, prompt in pairs)


def engine_of(target: TargetModel, backend: AttentionBackend, batch: int, acceptance_length: float | None) -> Engine:
    """An engine that decodes greedily: without drafts, or with a replay at `acceptance_length`."""
    drafter: Drafter = RandomDrafter(target.vocab_size, 0)
    if acceptance_length is not None:
        config = ReplayConfig(p=_probability(acceptance_length), num_speculative_tokens=DRAFTED)
        drafter = ReplayDrafter(config, target.vocab_size)
    return Engine(CausalLMRunner(target, backend), drafter, batch_size=batch, scheduler=StaticScheduler(batch))


def _probability(acceptance_length: float) -> float:
    """``p`` with ``1 + p + … + p^DRAFTED = τ``: the only root that is not negative."""
    roots = np.roots([1.0] * DRAFTED + [1 - acceptance_length])
    return min(1.0, max(float(root.real) for root in roots if abs(root.imag) < 1e-9))
