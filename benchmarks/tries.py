"""A trie of continuations against one chain: `suffix` and `rest` with several `branches`, on Spec-Bench by category.

    python benchmarks/tries.py --model TARGET --data spec_bench.jsonl --store STORE

`STORE` is what `emssd-rest build` made; without it, `rest` is left out. Prompts are first turns, the end of those that
are too long. All engines of a category and a batch size are interleaved in one process; each figure is the median of
the repeats, end to end (prompts included), as a ratio to plain greedy decoding on the same backend.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from emssd.data.prompts import encode_prompts
from emssd.decoding.assembly import eos_token_ids
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.decoding.warmup import warm_up
from emssd.model import TargetModel, load_model
from emssd.plugins.registry import Registry
from emssd.sequences import Request

TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")  # all others are MT-Bench's


def requests_of(path: str, limit: int, new: int, target: TargetModel, tokenizer: Any) -> dict[str, list[Request]]:
    """By category, the first prompts of a Spec-Bench file; as long as the model takes with `new` tokens more."""
    texts = defaultdict[str, list[str]](list)
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        category = record["category"] if record["category"] in TASKS else "mt_bench"
        texts[category].append(record["turns"][0])
    eos, bos = eos_token_ids(target, tokenizer), tokenizer.bos_token_id
    found = {}
    for category, some in texts.items():
        encoded = encode_prompts(some[:limit], tokenizer)
        plain = [ids[1:] if ids[0] == bos else ids for ids in encoded]
        begin = () if bos is None else (bos,)
        room = target.max_model_len - new - len(begin)
        found[category] = [Request(str(i), (*begin, *ids[-room:]), new, eos) for i, ids in enumerate(plain)]
    return found


def drafters_of(branches: list[int], store: str | None) -> dict[str, Any]:
    """By name, the config of each drafter: chains, and tries of so many branches."""
    registry = Registry()
    given: dict[str, dict[str, Any]] = {"suffix": {}} | ({} if store is None else {"rest": {"store": store}})
    return {
        f"{name} {number}": registry.find("drafter", name).config(branches=number, **options)
        for name, options in given.items()
        for number in (1, *branches)
    }


def measure(engines: dict[str, Engine], requests: list[Request], repeats: int) -> dict[str, dict[str, Any]]:
    """What each engine took and gave, interleaved; the first is what the others are compared with."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    outputs: dict[str, dict[str, tuple[int, ...]]] = {}
    for engine in engines.values():
        warm_up(engine, requests)
    names = list(engines)
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            start = time.perf_counter()
            outputs[name] = {done.request_id: done.token_ids for done in engines[name].run(requests)}
            seconds[name].append(time.perf_counter() - start)
    base, reports = names[0], {name: engine.report for name, engine in engines.items()}
    return {
        name: {
            "seconds": values,
            "tokens_per_second": sum(map(len, outputs[name].values())) / statistics.median(values),
            "ratio": statistics.median(seconds[base]) / statistics.median(values),
            "ratios": [plain / own for plain, own in zip(seconds[base], values, strict=True)],
            "tau": reports[name].mean_acceptance_length,
            "nodes_per_step": reports[name].num_drafted / max(1, reports[name].num_row_steps),
            "draft_share": reports[name].seconds.get("draft", 0.0) / reports[name].total_seconds,
            "equal_rows": sum(outputs[name][row] == tokens for row, tokens in outputs[base].items()),
        }
        for name, values in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--store", help="folder of a store for drafter=rest")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action="store_true", help="with model.compile=true")
    parser.add_argument("--backend", default="ragged", help="one that takes token trees")
    parser.add_argument("--budget", default="adaptive")
    parser.add_argument("--branches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--categories", nargs="+", default=["mt_bench", *TASKS])
    parser.add_argument("--prompts", type=int, default=16, help="of each category")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    target, tokenizer = load_model(arguments.model, dtype=arguments.dtype, device="cpu", compile=arguments.compile)
    by_category = requests_of(arguments.data, arguments.prompts, arguments.max_new_tokens, target, tokenizer)
    drafters = {"plain": "none"} | drafters_of(arguments.branches, arguments.store)
    console, rows = Console(width=150), list[dict[str, Any]]()
    for batch_size in arguments.batch_sizes:
        for category in arguments.categories:
            engines = {
                name: Engine.assemble(
                    target,
                    tokenizer,
                    drafter=drafter,
                    backend=arguments.backend,
                    budget=arguments.budget,
                    options=EngineOptions(batch_size=batch_size, on_drafter_error="fail", prefix_caching=False),
                )
                for name, drafter in drafters.items()
            }
            cells = measure(engines, by_category[category], arguments.repeats)
            rows.append({"category": category, "batch_size": batch_size, "cells": cells})
            console.print(f"batch {batch_size:>2} {category}", highlight=False)
            if arguments.out:
                arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(
        f"{arguments.model}, {target.dtype}, compile={arguments.compile}, backend {arguments.backend}, "
        f"budget {arguments.budget}, "
        f"{arguments.prompts} prompts, {torch.get_num_threads()} threads"
    )
    console.print(table(rows))


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(
        "batch", "category", "drafter", "tokens/s", "÷ plain", "spread", "τ", "nodes", "drafting", "equal rows"
    )
    for row in rows:
        for name, cell in row["cells"].items():
            shown.add_row(
                str(row["batch_size"]), row["category"], name, f"{cell['tokens_per_second']:.0f}",
                f"{cell['ratio']:.2f}", f"{min(cell['ratios']):.2f} to {max(cell['ratios']):.2f}", f"{cell['tau']:.2f}",
                f"{cell['nodes_per_step']:.1f}", f"{cell['draft_share']:.1%}", str(cell["equal_rows"]),
            )  # fmt: skip
    return shown


if __name__ == "__main__":
    main()
