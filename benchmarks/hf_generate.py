"""Compares emssd with Hugging Face ``generate`` (static batch, left-padded) on the same model and prompts.

    python benchmarks/hf_generate.py                                      # the embedded demo
    python benchmarks/hf_generate.py --model DIR --data FILE.jsonl --template "<s>Question: {question}\\nRestated:"

Every figure is a ratio of medians of interleaved repeats in one process; tokens are counted up to and including EOS.
Beside each speed stands how many rows equal HF's own greedy output. It also prints which share of a step lies outside
of the model's forward pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from emssd.data.prompts import encode_prompts
from emssd.data.records import RecordsConfig, existing_file, read_records, to_prompts
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.demo import prompts as demo_prompts
from emssd.model import TargetModel, load_model

Tokens = list[tuple[int, ...]]
Run = Callable[[], Tokens]


def hf_generate(
    target: TargetModel, prompts: list[list[int]], batch_size: int, new: int, eos: frozenset[int]
) -> Tokens:
    """HF's greedy decoding of static batches in file order."""
    outputs: Tokens = []
    for start in range(0, len(prompts), batch_size):
        rows = prompts[start : start + batch_size]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        with torch.inference_mode():
            out = target.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0,
                eos_token_id=sorted(eos) or None,
            )  # fmt: skip
        for row in out[:, width:].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
            outputs.append(tuple(row[:end]))
    return outputs


def emssd_generate(engine: Engine, prompts: list[list[int]], new: int) -> Tokens:
    """The same through emssd."""
    return [generation.token_ids for generation in engine.generate(prompts, new)]


def measure(runs: dict[str, Run], repeats: int) -> dict[str, tuple[list[float], Tokens]]:
    """Tokens/s of each run, interleaved, after one warm-up each."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    outputs = {name: run() for name, run in runs.items()}
    with Progress(transient=True) as progress:
        for _ in progress.track(range(repeats), description="repeats"):
            for name, run in runs.items():
                start = time.perf_counter()
                count = sum(len(tokens) for tokens in run())
                rates[name].append(count / (time.perf_counter() - start))
    return {name: (rates[name], outputs[name]) for name in runs}


def load_prompts(arguments: argparse.Namespace, target: TargetModel, tokenizer: object) -> list[list[int]]:
    if arguments.data is None:
        texts = [prompt.text for prompt in demo_prompts(arguments.limit)]
    else:
        config = RecordsConfig(template=arguments.template, limit=arguments.limit)
        records = read_records(existing_file(arguments.data))
        texts = [prompt.text for prompt in to_prompts(records, config, arguments.data)]
    return encode_prompts(texts, tokenizer)


def compare(
    target: TargetModel,
    engines: dict[str, Engine],
    prompts: list[list[int]],
    batch_size: int,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One row of figures per run at one batch size."""
    new, eos = arguments.max_new_tokens, next(iter(engines.values())).eos_token_ids
    runs: dict[str, Run] = {"HF generate": partial(hf_generate, target, prompts, batch_size, new, eos)}
    runs |= {name: partial(emssd_generate, engine, prompts, new) for name, engine in engines.items()}
    results = measure(runs, arguments.repeats)
    base, reference = statistics.median(results["HF generate"][0]), results["HF generate"][1]
    rows = []
    for name, (rates, outputs) in results.items():
        report = engines[name].report if name in engines else None
        rows.append(
            {
                "batch_size": batch_size,
                "run": name,
                "tokens_per_second": rates,
                "median": statistics.median(rates),
                "ratio": statistics.median(rates) / base,
                "equal_rows": sum(ours == theirs for ours, theirs in zip(outputs, reference, strict=True)),
                "tau": report.mean_acceptance_length if report else None,
                "outside": 1 - report.seconds["forward"] / report.total_seconds if report else None,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="folder, hub id or 'demo'")
    parser.add_argument("--data", help="JSONL file of prompts; the demo's own by default")
    parser.add_argument("--template", default="{prompt}", help="makes a prompt from a record's fields")
    parser.add_argument("--limit", type=int, default=32, help="number of prompts")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--drafters", nargs="+", default=["none", "llma"])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args()

    target, tokenizer = load_model(arguments.model, dtype=arguments.dtype, device="cpu")
    prompts = load_prompts(arguments, target, tokenizer)
    rows = []
    for batch_size in arguments.batch_sizes:
        engines = {
            f"emssd {drafter}": Engine.assemble(
                target,
                tokenizer,
                drafter=drafter,
                backend="ragged",
                options=EngineOptions(batch_size=batch_size, prefix_caching=False),
            )
            for drafter in arguments.drafters
        }
        rows += compare(target, engines, prompts, batch_size, arguments)
    table = Table("batch", "run", "tokens/s (median)", "min – max", "× HF generate", "equal to HF", "τ", "outside")
    for row in rows:
        table.add_row(
            str(row["batch_size"]),
            str(row["run"]),
            f"{row['median']:.0f}",
            f"{min(row['tokens_per_second']):.0f} – {max(row['tokens_per_second']):.0f}",
            f"{row['ratio']:.2f}",
            f"{row['equal_rows']}/{len(prompts)}",
            f"{row['tau']:.2f}" if row["tau"] else "",
            f"{row['outside']:.1%}" if row["outside"] else "",
        )
    console = Console()
    console.print(f"{arguments.model}, {target.dtype}, {torch.get_num_threads()} threads, {len(prompts)} prompts")
    console.print(table)
    console.print("outside: share of a step's time outside of the model's forward pass")
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
