"""Continuous against static batches, and ways to admit rows where the KV cache is small, on one model.

    python benchmarks/continuous.py --model TARGET --data gsm8k.jsonl

Prompts alternate between two kinds whose outputs differ in length; rows end at their EOS. All runs are interleaved in
one process; each figure is the median of the repeats, end to end. Outputs must be the same in all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from budgets import TEMPLATES, requests_of
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from emssd.decoding.engine import Engine
from emssd.decoding.options import Admission, Batching, EngineOptions
from emssd.decoding.warmup import warm_up
from emssd.model import load_model
from emssd.sequences import Request


def mixed(kinds: list[list[Request]]) -> list[Request]:
    """One of each kind in turn."""
    rows = [request for group in zip(*kinds, strict=True) for request in group]
    return [Request(str(i), row.prompt_ids, row.max_new_tokens, row.eos_token_ids) for i, row in enumerate(rows)]


def engines_of(target: Any, tokenizer: Any, batch_size: int, drafters: list[str], tight: str) -> dict[str, Engine]:
    def engine(drafter: str, **options: Any) -> Engine:
        chosen = EngineOptions(batch_size=batch_size, prefix_caching=False, **options)
        return Engine.assemble(target, tokenizer, drafter=drafter, backend="ragged", budget="adaptive", options=chosen)

    made = {}
    for drafter in drafters:
        made[f"{drafter}, static"] = engine(drafter, batching=Batching.static)
        made[f"{drafter}, continuous"] = engine(drafter)
    for admission in Admission:
        name = f"{drafters[0]}, continuous, {tight}, {admission.value}"
        made[name] = engine(drafters[0], kv_memory=tight, admission=admission)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="JSONL file with a field 'question'")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--drafters", nargs="+", default=["none", "llma"])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--kv-memory", default="20MB", help="for the two runs with a small KV cache")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    target, tokenizer = load_model(arguments.model, dtype=arguments.dtype, device="cpu")
    limit, new = arguments.prompts // 2, arguments.max_new_tokens
    requests = mixed([requests_of(arguments.data, text, limit, new, target, tokenizer) for text in TEMPLATES.values()])
    engines = engines_of(target, tokenizer, arguments.batch_size, arguments.drafters, arguments.kv_memory)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    outputs: dict[str, dict[str, tuple[int, ...]]] = {}
    for engine in engines.values():
        warm_up(engine, requests)
    with Progress(transient=True) as progress:
        for _ in progress.track(range(arguments.repeats), description="repeats"):
            for name, engine in engines.items():
                start = time.perf_counter()
                outputs[name] = {done.request_id: done.token_ids for done in engine.run(requests)}
                seconds[name].append(time.perf_counter() - start)
    first = next(iter(engines))
    lengths = sorted(len(tokens) for tokens in outputs[first].values())
    rows = []
    for name, engine in engines.items():
        base = name.split(",")[0] + ", static"
        rows.append(
            {
                "run": name,
                "seconds": seconds[name],
                "tokens_per_second": sum(map(len, outputs[name].values())) / statistics.median(seconds[name]),
                "over_static": statistics.median(seconds[base]) / statistics.median(seconds[name]),
                "batch_fill": engine.report.batch_fill,
                "steps": engine.report.num_steps,
                "preempted": engine.report.num_preempted,
                "kv_peak_mib": engine.report.kv_usage.peak_held / 2**20,
                "equal_rows": sum(outputs[name][row] == tokens for row, tokens in outputs[first].items()),
            }
        )
    console = Console(width=150)
    console.print(
        f"{arguments.model}, {target.dtype}, batch {arguments.batch_size}, {len(requests)} prompts, output lengths "
        f"{lengths[0]} to {lengths[-1]}, median {statistics.median(lengths)}, {torch.get_num_threads()} threads"
    )
    table = Table("run", "tokens/s", "÷ static", "batch fill", "steps", "preempted", "KV peak MiB", "equal rows")
    for row in rows:
        table.add_row(
            row["run"], f"{row['tokens_per_second']:.0f}", f"{row['over_static']:.2f}", f"{row['batch_fill']:.1%}",
            str(row["steps"]), str(row["preempted"]), f"{row['kv_peak_mib']:.1f}",
            f"{row['equal_rows']}/{len(requests)}",
        )  # fmt: skip
    console.print(table)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
