"""The Python part of a step with a trained head or a draft model: the thread's time less that of compiled programs.

    python benchmarks/head_time.py

The demo, in float32, on one thread. In the time of a program is all that C++ does in its call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from emssd_draft_model import DraftModelConfig
from emssd_eagle3 import Eagle3Config
from rich.console import Console
from rich.table import Table

from emssd import Engine
from emssd.data.demo import model_path, prompts
from emssd.model.program import Program
from emssd.sequences import Request

HEAD, DRAFT = str(model_path("eagle3")), str(model_path("draft"))
DRAFTERS = {
    "eagle3, trees": Eagle3Config(path=HEAD),
    "eagle3, chains": Eagle3Config(path=HEAD, tree="chain"),
    "draft_model, trees": DraftModelConfig(path=DRAFT, tree="dynamic"),
    "draft_model, chains": DraftModelConfig(path=DRAFT),
}
WARM_UP, PROMPT_TOKENS, NEW_TOKENS = 10, 200, 400


def timed(method: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """`method`, whose seconds of this thread are added to ``spent[0]``."""

    def run(*arguments: Any) -> Any:
        start = time.thread_time()
        try:
            return method(*arguments)
        finally:
            spent[0] += time.thread_time() - start

    return run


def step_times(config: Any, batch_size: int, num_steps: int, spent: list[float]) -> tuple[float, float]:
    """The median milliseconds of Python's part of a step, and of the whole."""
    engine = Engine.from_pretrained(
        "demo", drafter=config, budget="fixed", compile=True, dtype="float32", batch_size=batch_size
    )
    for name, prompt in enumerate(prompts(batch_size)):
        tokens = engine.tokenizer(prompt.text)["input_ids"][:PROMPT_TOKENS]
        engine.add(Request(str(name), tuple(tokens), NEW_TOKENS, frozenset()))
    for _ in range(WARM_UP):
        engine.step()
    own, whole = list[float](), list[float]()
    for _ in range(num_steps):
        spent[0], start = 0.0, time.thread_time()
        engine.step()
        whole.append(1000 * (time.thread_time() - start))
        own.append(whole[-1] - 1000 * spent[0])
    return statistics.median(own), statistics.median(whole)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spent = [0.0]
    name = "__call__"
    setattr(Program, name, timed(getattr(Program, name), spent))
    table = Table("drafter", "batch", "Python, ms a step", "whole")
    for drafter, config in DRAFTERS.items():
        for size in options.batch_sizes:
            runs = [step_times(config, size, options.steps, spent) for _ in range(options.repeats)]
            table.add_row(drafter, str(size), *(f"{statistics.median(each):.2f}" for each in zip(*runs, strict=True)))
    Console().print(table)


if __name__ == "__main__":
    main()
