"""Every drafter on one target, by batch size and kind of prompts: speed, acceptance and nodes.

    python benchmarks/drafters.py --model TARGET --data gsm8k.jsonl --skip 500 --spec-bench spec_bench.jsonl \\
        --drafter 'suffix' --drafter 'eagle3 path=HEAD tree=chain depth=4' --drafter 'eagle3 path=HEAD num_nodes=8'

A drafter is a name and its options; a label and a colon may stand before it. Cells of one batch size and kind of
prompts are interleaved in one process. A figure is a ratio to plain greedy decoding on the same engine, end to end
(prompts included): the median of the ratios within each repeat; τ is tokens per row and step, nodes are drafted tokens
per row and step, draft is the share of drafting in the time. Prompts are those behind the first `--skip`, which a head
may have been trained on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from budgets import TEMPLATES, measure
from emssd_adaptive import AdaptiveConfig
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from emssd.data.prompts import encode_prompts
from emssd.decoding.assembly import eos_token_ids
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.model import TargetModel, load_model
from emssd.plugins.builtin import FixedBudgetConfig
from emssd.plugins.registry import Registry
from emssd.sequences import Request

BUDGETS = {"adaptive": AdaptiveConfig, "fixed": FixedBudgetConfig}


def drafter_of(text: str, registry: Registry) -> tuple[str, Any]:
    """The label and the config of ``LABEL: NAME OPTION=VALUE …``."""
    label, found, choice = text.partition(": ")
    label, choice = (label, choice) if found else ("", text)
    name, *options = choice.split()
    values = {key: yaml.safe_load(value) for key, _, value in (option.partition("=") for option in options)}
    return label or " ".join([name, *(f"{k}={v}" for k, v in values.items() if k != "path")]), registry.find(
        "drafter", name
    ).config(**values)


def texts_of(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """The prompts of each kind."""
    texts = {}
    if arguments.data:
        records = [json.loads(line) for line in Path(arguments.data).read_text(encoding="utf-8").splitlines()]
        questions = [record["question"] for record in records[arguments.skip :]]
        texts = {kind: [each.format(question=text) for text in questions] for kind, each in TEMPLATES.items()}
    if arguments.spec_bench:
        lines = Path(arguments.spec_bench).read_text(encoding="utf-8").splitlines()
        turns = [json.loads(line)["turns"][0] for line in lines]
        texts["Spec-Bench"] = turns[:: max(1, len(turns) // 100)]  # some of each category
    return texts


def requests_of(texts: list[str], new: int, target: TargetModel, tokenizer: Any) -> list[Request]:
    """Requests for the ends of prompts that leave room for `new` tokens."""
    eos, room = eos_token_ids(target, tokenizer), target.max_model_len - new
    return [Request(str(i), tuple(ids[-room:]), new, eos) for i, ids in enumerate(encode_prompts(texts, tokenizer))]


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table("prompts", "batch", "drafter", "× greedy", "spread", "tokens/s", "τ", "nodes", "draft", "equal rows")
    for row in rows:
        for name, cell in row["cells"].items():
            table.add_row(
                row["prompts"], str(row["batch_size"]), name, f"{cell['ratio']:.2f}",
                f"{min(cell['ratios']):.2f} – {max(cell['ratios']):.2f}", f"{cell['tokens_per_second']:.0f}",
                f"{cell['tau']:.2f}", f"{cell['nodes']:.1f}", f"{cell['share']['draft']:.0%}", str(cell["equal_rows"]),
            )  # fmt: skip
        table.add_section()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True, action="append", help="[LABEL:] NAME OPTION=VALUE …")
    parser.add_argument("--data", help="JSONL file with a field 'question'")
    parser.add_argument("--skip", type=int, default=0, help="questions at the file's beginning to leave out")
    parser.add_argument("--spec-bench", help="Spec-Bench's JSONL file")
    parser.add_argument("--kinds", nargs="+", help="of prompts; all")
    parser.add_argument("--budgets", nargs="+", default=["adaptive"], choices=list(BUDGETS))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action="store_true", help="with model.compile=true")
    parser.add_argument("--backend", default="ragged")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--prompts-per-row", type=int, default=2, help="prompts for each row of the batch, at least 8")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    registry, console, rows = Registry(), Console(width=150), list[dict[str, Any]]()
    drafters = dict(drafter_of(text, registry) for text in arguments.drafter)
    target, tokenizer = load_model(arguments.model, dtype=arguments.dtype, device="cpu", compile=arguments.compile)
    with Progress(console=console, transient=True) as progress:
        for batch_size in arguments.batch_sizes:
            options = EngineOptions(batch_size=batch_size, prefix_caching=False)
            cells: dict[str, tuple[Any, Any]] = {"greedy": ("none", FixedBudgetConfig(0))}
            for budget in arguments.budgets:
                suffix = f", {budget}" if len(arguments.budgets) > 1 else ""
                cells |= {label + suffix: (drafter, BUDGETS[budget]()) for label, drafter in drafters.items()}
            engines = {
                label: Engine.assemble(
                    target, tokenizer, drafter=drafter, backend=arguments.backend, budget=budget, options=options,
                    registry=registry,
                )
                for label, (drafter, budget) in cells.items()
            }  # fmt: skip
            for kind, texts in texts_of(arguments).items():
                if arguments.kinds and kind not in arguments.kinds:
                    continue
                limit = max(8, arguments.prompts_per_row * batch_size)
                requests = requests_of(texts[:limit], arguments.max_new_tokens, target, tokenizer)
                measured = measure(engines, requests, arguments.repeats, progress)
                for label, engine in engines.items():
                    measured[label]["nodes"] = engine.report.num_drafted / engine.report.num_row_steps
                rows.append({"prompts": kind, "batch_size": batch_size, "cells": measured})
                console.print(table_of(rows[-1:]))
                if arguments.out:
                    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(f"{arguments.model}, {target.dtype}, compile={arguments.compile}, {torch.get_num_threads()} threads")
    console.print(table_of(rows))


if __name__ == "__main__":
    main()
