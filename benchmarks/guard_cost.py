"""What a run pays to see that its model is still the same, in steps; see docs/decisions/0036-guard.md.

    python benchmarks/guard_cost.py --shape qwen2-0.5b --dtype bfloat16 --batch-sizes 1 8

Weights of `--shape` are random; `demo` is the embedded model. Steps decode greedily without drafts. One look and one
step take turns, so that other processes hit both alike. The figures are medians, and the ratio is theirs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from cpu_step import SHAPES, random_model

from emssd import Engine
from emssd.model import guard
from emssd.sequences import Request


def seconds(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measured(engine: Engine, repeats: int) -> dict[str, float]:
    """Medians in milliseconds."""
    target, width = engine.target, min(engine.target.vocab_size, 1000)
    assert target._guard is not None
    prompts = [tuple((17 * row + 5 * i) % width for i in range(32)) for row in range(engine.batch_size)]
    for row, prompt in enumerate(prompts):
        engine.add(Request(str(row), prompt, repeats + 8))
    for _ in range(3):
        engine.step()
    times: dict[str, list[float]] = {"step": [], "look": [], "checksums": []}
    runs: dict[str, Callable[[], Any]] = {
        "step": engine.step,
        "look": target.begin,
        "checksums": lambda: guard.checksums([*target.model.parameters()]),
    }
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(seconds(run, target.device))
    engine.clear()
    return {name: 1000 * statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=["demo", *SHAPES], default="qwen2-0.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    for batch_size in options.batch_sizes:
        if options.shape == "demo":
            made: dict[str, Any] = {"compile": options.compile, "device": options.device}
            engine = Engine.from_pretrained("demo", drafter="none", batch_size=batch_size, **made)
        else:
            model = random_model(options.shape, getattr(torch, options.dtype)).to(options.device)
            engine = Engine.from_model(model, drafter="none", batch_size=batch_size, compile=options.compile)
        found = measured(engine, options.repeats)
        print(
            f"{options.shape} {engine.target.dtype} on {engine.target.device}, batch {batch_size}, "
            f"{torch.get_num_threads()} threads: step {found['step']:.2f} ms, look {found['look']:.2f} ms (checksums "
            f"{found['checksums']:.2f}): {found['look'] / found['step']:.2f} steps"
        )


if __name__ == "__main__":
    main()
