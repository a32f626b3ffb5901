"""Budgets of drafted tokens: no drafts, every fixed length and `adaptive`, on one model, by batch size and prompts.

    python benchmarks/budgets.py --model TARGET --draft-model DRAFT --data gsm8k.jsonl

Cells of one batch size, drafter and kind of prompts are interleaved in one process. A figure is a ratio to plain greedy
decoding on the same engine, end to end (prompts included): the median of the ratios within each repeat.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from emssd_adaptive import AdaptiveConfig
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from emssd.data.prompts import encode_prompts
from emssd.data.records import RecordsConfig, existing_file, read_records, to_prompts
from emssd.decoding.assembly import eos_token_ids
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.decoding.warmup import warm_up
from emssd.metrics.stats import RunReport
from emssd.model import TargetModel, load_model
from emssd.plugins.builtin import FixedBudgetConfig
from emssd.plugins.registry import Registry
from emssd.sequences import Request

TEMPLATES = {"copy-heavy": "<s>Question: {question}\nRestated:", "plain": "<s>Question: {question}\nAnswer:"}


def requests_of(path: str, template: str, limit: int, new: int, target: TargetModel, tokenizer: Any) -> list[Request]:
    prompts = to_prompts(read_records(existing_file(path)), RecordsConfig(template=template, limit=limit), path)
    encoded = encode_prompts([prompt.text for prompt in prompts], tokenizer)
    eos = eos_token_ids(target, tokenizer)
    return [Request(str(i), tuple(ids), new, eos) for i, ids in enumerate(encoded)]


def engines_of(
    target: TargetModel, tokenizer: Any, drafter: str, lengths: list[int], batch_size: int, draft_model: str
) -> dict[str, Engine]:
    registry, options = Registry(), EngineOptions(batch_size=batch_size, prefix_caching=False)
    drafters: dict[str, Any] = {"none": "none", "llma": "llma"}
    plugin = registry.find("drafter", "draft_model")
    drafters["draft_model"] = plugin.config(path=draft_model)
    cascade = registry.find("drafter", "cascade")
    drafters["cascade"] = cascade.config(options={"draft_model": {"path": draft_model}})
    budgets: dict[str, Any] = {"greedy": FixedBudgetConfig(0)}
    budgets |= {f"fixed {length}": FixedBudgetConfig(length) for length in lengths} | {"adaptive": AdaptiveConfig()}
    return {
        name: Engine.assemble(
            target,
            tokenizer,
            drafter="none" if name == "greedy" else drafters[drafter],
            backend="ragged",
            budget=budget,
            options=options,
            registry=registry,
        )
        for name, budget in budgets.items()
    }


SLICE = 0.1  # seconds that an engine has to itself before the next one goes on


def measure(engines: dict[str, Engine], requests: list[Request], repeats: int, progress: Progress) -> dict[str, Any]:
    """Seconds of each engine; outputs must be the same in all.

    In a repeat all engines decode the same requests, in turns of `SLICE` seconds. So a machine that becomes slower does
    so for all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    outputs: dict[str, dict[str, tuple[int, ...]]] = {}
    for engine in engines.values():
        warm_up(engine, requests)
    task = progress.add_task("repeats", total=repeats * len(engines))
    names = list(engines)
    for repeat in range(repeats):
        for engine in engines.values():
            engine.report = RunReport()
            for request in requests:
                engine.add(request)
        taken, outputs = dict.fromkeys(engines, 0.0), {name: {} for name in engines}
        waiting = names[repeat % len(names) :] + names[: repeat % len(names)]
        while waiting:
            for name in waiting:
                taken[name] += _slice(engines[name], outputs[name])
            progress.advance(task, sum(not engines[name].scheduler.has_work for name in waiting))
            waiting = [name for name in waiting if engines[name].scheduler.has_work]
        for name, own in taken.items():
            seconds[name].append(own)
    progress.remove_task(task)
    base = outputs["greedy"]
    ratios = {
        name: [greedy / own for greedy, own in zip(seconds["greedy"], values, strict=True)]
        for name, values in seconds.items()
    }
    return {
        name: {
            "seconds": values,
            "ratio": statistics.median(ratios[name]),
            "ratios": ratios[name],
            "equal_rows": sum(outputs[name][row] == tokens for row, tokens in base.items()),
            "tau": engines[name].report.mean_acceptance_length,
            "batch_fill": engines[name].report.batch_fill,
            "share": {
                phase: value / engines[name].report.total_seconds
                for phase, value in engines[name].report.seconds.items()
            },
            "tokens_per_second": sum(map(len, outputs[name].values())) / statistics.median(values),
        }
        for name, values in seconds.items()
    }


def _slice(engine: Engine, outputs: dict[str, tuple[int, ...]]) -> float:
    """Let `engine` decode for `SLICE` seconds; what ended goes to `outputs`. Returns the seconds that it took."""
    start, taken = time.perf_counter(), 0.0
    while engine.scheduler.has_work and taken < SLICE:
        outputs.update({sequence.request_id: tuple(sequence.output_ids) for sequence in engine.step()})
        taken = time.perf_counter() - start
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--data", required=True, help="JSONL file with a field 'question'")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action="store_true", help="with model.compile=true")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--drafters", nargs="+", default=["llma", "draft_model", "cascade"])
    parser.add_argument("--prompts", nargs="+", default=list(TEMPLATES), choices=list(TEMPLATES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4, 7], help="fixed budgets")
    parser.add_argument("--prompts-per-row", type=int, default=3, help="prompts for each row of the batch, at least 8")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    target, tokenizer = load_model(arguments.model, dtype=arguments.dtype, device="cpu", compile=arguments.compile)
    console, rows = Console(width=150), []
    with Progress(console=console, transient=True) as progress:
        for kind in arguments.prompts:
            for batch_size in arguments.batch_sizes:
                limit = max(8, arguments.prompts_per_row * batch_size)
                requests = requests_of(
                    arguments.data, TEMPLATES[kind], limit, arguments.max_new_tokens, target, tokenizer
                )
                for drafter in arguments.drafters:
                    lengths = [length for length in arguments.lengths if drafter != "draft_model" or length <= 4]
                    engines = engines_of(target, tokenizer, drafter, lengths, batch_size, arguments.draft_model)
                    cells = measure(engines, requests, arguments.repeats, progress)
                    rows.append({"prompts": kind, "batch_size": batch_size, "drafter": drafter, "cells": cells})
                    console.print(line(rows[-1]), highlight=False)
                    if arguments.out:
                        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    table = Table(
        "prompts", "drafter", "batch", "best fixed", "adaptive", "÷ best fixed", "schedule + plan", "equal rows"
    )
    for row in rows:
        fixed = {name: cell["ratio"] for name, cell in row["cells"].items() if name.startswith("fixed")}
        best, adaptive = max(fixed, key=fixed.__getitem__), row["cells"]["adaptive"]
        share = adaptive["share"]
        table.add_row(
            row["prompts"], row["drafter"], str(row["batch_size"]), f"{fixed[best]:.2f} ({best})",
            f"{adaptive['ratio']:.2f}", f"{adaptive['ratio'] / fixed[best]:.2f}",
            f"{share['schedule'] + share['plan']:.1%}", str(adaptive["equal_rows"]),
        )  # fmt: skip
    console.print(f"{arguments.model}, {target.dtype}, {torch.get_num_threads()} threads")
    console.print(table)


def line(row: dict[str, Any]) -> str:
    cells = ", ".join(f"{name} {cell['ratio']:.2f}" for name, cell in row["cells"].items())
    return f"{row['prompts']:>10} {row['drafter']:>11} batch {row['batch_size']:>2}: {cells}"


if __name__ == "__main__":
    main()
