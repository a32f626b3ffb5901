"""Milliseconds from `generate` to the first step: what an engine does for a model that it owns, or has borrowed.

A Llama of 30 layers with small weights, uncompiled: the time depends on the number of tensors and modules alone.

    python benchmarks/begin_cost.py [--layers 30] [--repeats 50]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from emssd_testing.models import tiny_model

from emssd import Engine


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each kind of engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args(arguments)
    model = tiny_model("llama", num_hidden_layers=options.layers)
    counts = len([*model.parameters()]), len([*model.modules()])
    for name, frozen in (("borrowed", False), ("owned", True)):
        engine = Engine.from_model(model, drafter="none", frozen=frozen)
        times = []
        with torch.inference_mode():
            for _ in range(options.repeats):
                start = time.perf_counter()
                engine.runner.begin()
                times.append(1e3 * (time.perf_counter() - start))
        low, middle, high = min(times), statistics.median(times), max(times)
        print(f"{name}: {middle:.2f} ms ({low:.2f} to {high:.2f}), {counts[0]} tensors in {counts[1]} modules")


if __name__ == "__main__":
    main()
