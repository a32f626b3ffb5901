"""What sampling costs, and what drafts gain where tokens are sampled, by batch size.

    python benchmarks/sampling_speed.py --model TARGET --draft-model DRAFT --data gsm8k.jsonl

``sampled ÷ greedy`` is plain sampling beside plain greedy decoding, in tokens/s. The other figures are tokens/s with
drafts beside plain sampling, under the budget policy ``adaptive``; τ is tokens per row and step. Cells of a batch size
are interleaved in one process. A ratio is of one repeat, end to end (prompts included), and the median is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from budgets import TEMPLATES, requests_of
from emssd_adaptive import AdaptiveConfig
from emssd_draft_model import DraftModelConfig, TreeKind
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.decoding.warmup import warm_up
from emssd.model import TargetModel, load_model
from emssd.plugins.builtin import FixedBudgetConfig
from emssd.plugins.registry import Registry
from emssd.sampling import SamplingParams
from emssd.sequences import Request

GREEDY, SAMPLED = "plain greedy", "plain sampled"


def cells_of(arguments: argparse.Namespace) -> dict[str, tuple[Any, Any]]:
    """By the name of a cell its drafter and its budget policy."""
    path, adaptive = arguments.draft_model, AdaptiveConfig()
    shape: dict[str, Any] = {"num_nodes": arguments.nodes, "depth": arguments.depth, "top_k": arguments.top_k}
    drafters = {
        "llma": "llma",
        "suffix": "suffix",
        "draft_model chain": DraftModelConfig(path, arguments.length),
        "draft_model dynamic": DraftModelConfig(path, tree=TreeKind.dynamic, **shape),
    }
    plain = ("none", FixedBudgetConfig(0))
    return {GREEDY: plain, SAMPLED: plain} | {name: (drafter, adaptive) for name, drafter in drafters.items()}


def engines_of(
    cells: dict[str, tuple[Any, Any]], target: TargetModel, tokenizer: Any, batch_size: int, backend: str
) -> dict[str, Engine]:
    registry, options = Registry(), EngineOptions(batch_size=batch_size, prefix_caching=False)
    return {
        name: Engine.assemble(
            target, tokenizer, drafter=drafter, backend=backend, budget=budget, options=options, registry=registry
        )
        for name, (drafter, budget) in cells.items()
    }


def measure(
    engines: dict[str, Engine], greedy: list[Request], sampling: SamplingParams, repeats: int, progress: Progress
) -> dict[str, Any]:
    """Tokens per second of each engine, interleaved; every repeat has a seed of its own."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    texts: dict[str, list[dict[str, tuple[int, ...]]]] = {name: [] for name in engines}
    taus: dict[str, list[float]] = {name: [] for name in engines}
    sampled = [replace(request, sampling=sampling) for request in greedy]
    for name, engine in engines.items():
        warm_up(engine, greedy if name == GREEDY else sampled)
    task = progress.add_task("repeats", total=repeats * len(engines))
    names = list(engines)
    for repeat in range(repeats):
        seeded = [replace(request, sampling=replace(sampling, seed=sampling.seed + repeat)) for request in greedy]
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            start = time.perf_counter()
            done = {each.request_id: each.token_ids for each in engines[name].run(greedy if name == GREEDY else seeded)}
            speeds[name].append(sum(map(len, done.values())) / (time.perf_counter() - start))
            texts[name].append(done)
            taus[name].append(engines[name].report.mean_acceptance_length)
            progress.advance(task)
    progress.remove_task(task)
    found = {}
    for name, own in speeds.items():
        base = speeds[GREEDY if name == SAMPLED else SAMPLED]
        ratios = [mine / other for mine, other in zip(own, base, strict=True)]
        right = texts[GREEDY if name == GREEDY else SAMPLED]
        found[name] = {
            "tokens_per_second": own,
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "tau": statistics.fmean(taus[name]),
            "equal_rows": min(
                sum(mine[row] == tokens for row, tokens in other.items())
                for mine, other in zip(texts[name], right, strict=True)
            ),
        }
    return found


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table("prompts", "batch", "cell", "tokens/s", "÷", "ratio", "spread", "τ", "equal rows")
    for row in rows:
        for name, cell in row["cells"].items():
            if name != GREEDY:
                table.add_row(
                    row["prompts"], str(row["batch_size"]), name, f"{statistics.median(cell['tokens_per_second']):.1f}",
                    GREEDY if name == SAMPLED else SAMPLED, f"{cell['ratio']:.2f}",
                    f"{min(cell['ratios']):.2f}–{max(cell['ratios']):.2f}", f"{cell['tau']:.2f}",
                    str(cell["equal_rows"]),
                )  # fmt: skip
        table.add_section()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--data", required=True, help="JSONL file with a field 'question'")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action="store_true", help="with model.compile=true")
    parser.add_argument("--backend", default="ragged")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompts", nargs="+", default=list(TEMPLATES), choices=list(TEMPLATES))
    parser.add_argument("--length", type=int, default=4, help="of chains")
    parser.add_argument("--nodes", type=int, default=16, help="of dynamic trees")
    parser.add_argument("--depth", type=int, default=5, help="of dynamic trees")
    parser.add_argument("--top-k", type=int, default=4, help="of dynamic trees")
    parser.add_argument("--prompts-per-row", type=int, default=3, help="prompts for each row of the batch, at least 8")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    target, tokenizer = load_model(arguments.model, dtype=arguments.dtype, device="cpu", compile=arguments.compile)
    sampling = SamplingParams(arguments.temperature, top_p=arguments.top_p, seed=arguments.seed)
    console, rows, cells = Console(width=150), list[dict[str, Any]](), cells_of(arguments)
    with Progress(console=console, transient=True) as progress:
        for kind in arguments.prompts:
            for batch_size in arguments.batch_sizes:
                limit, new = max(8, arguments.prompts_per_row * batch_size), arguments.max_new_tokens
                requests = requests_of(arguments.data, TEMPLATES[kind], limit, new, target, tokenizer)
                engines = engines_of(cells, target, tokenizer, batch_size, arguments.backend)
                measured = measure(engines, requests, sampling, arguments.repeats, progress)
                rows.append({"prompts": kind, "batch_size": batch_size, "sampling": str(sampling), "cells": measured})
                console.print(table_of(rows[-1:]))
                if arguments.out:
                    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(
        f"{arguments.model}, {target.dtype}, compile={arguments.compile}, T={arguments.temperature:g}, "
        f"{torch.get_num_threads()} threads"
    )
    console.print(table_of(rows))


if __name__ == "__main__":
    main()
