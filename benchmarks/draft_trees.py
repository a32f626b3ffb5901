"""Chains against token trees of one draft model: speed, acceptance and nodes, by batch size and prompts.

    python benchmarks/draft_trees.py --model TARGET --draft-model DRAFT --data gsm8k.jsonl

Cells of one batch size and kind of prompts are interleaved in one process. A figure is a ratio to plain greedy decoding
on the same engine, end to end (prompts included): the median of the ratios within each repeat; τ is tokens per row and
step, nodes are drafted tokens per row and step. Under ``fixed`` a row drafts all that its shape gives; a chain's best
length is among the cells. Under ``adaptive`` the policy cuts what does not pay.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from budgets import TEMPLATES, measure, requests_of
from emssd_adaptive import AdaptiveConfig
from emssd_draft_model import DraftModelConfig, TreeKind
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.model import TargetModel, load_model
from emssd.plugins.builtin import FixedBudgetConfig
from emssd.plugins.registry import Registry

_TREES = ["static", "dynamic", "sequoia"]


def cells_of(arguments: argparse.Namespace) -> dict[str, tuple[Any, Any]]:
    """By the name of a cell its drafter and its budget policy."""
    path, shape = arguments.draft_model, {"depth": arguments.depth, "top_k": arguments.top_k}
    drafters = {f"chain {k}": DraftModelConfig(path, k) for k in arguments.lengths}
    if "static" in arguments.trees:
        drafters["static"] = DraftModelConfig(path, tree=TreeKind.static, expansion=arguments.expansion)
    for kind in (TreeKind[name] for name in arguments.trees if name != "static"):
        for nodes in arguments.nodes if kind is TreeKind.dynamic else [max(arguments.nodes)]:
            drafters[f"{kind.value} {nodes}"] = DraftModelConfig(path, tree=kind, num_nodes=nodes, **shape)
    cells: dict[str, tuple[Any, Any]] = {"greedy": ("none", FixedBudgetConfig(0))}
    longest = {f"{kind} {most}" for kind, most in (
        ("chain", max(arguments.lengths)), ("dynamic", max(arguments.nodes)), ("sequoia", max(arguments.nodes))
    )}  # fmt: skip
    for name, drafter in drafters.items():
        cells[f"{name} fixed"] = (drafter, FixedBudgetConfig())
        if name == "static" or name in longest:
            cells[f"{name} adaptive"] = (drafter, AdaptiveConfig())
    return cells


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


def best_chain(cells: dict[str, Any]) -> float:
    """The ratio of the fastest chain, under any budget."""
    return max(float(cell["ratio"]) for name, cell in cells.items() if name.startswith("chain"))


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "prompts", "batch", "cell", "÷ greedy", "÷ best chain", "τ", "nodes", "draft", "forward", "equal rows"
    )
    for row in rows:
        best = best_chain(row["cells"])
        for name, cell in row["cells"].items():
            table.add_row(
                row["prompts"], str(row["batch_size"]), name, f"{cell['ratio']:.2f}", f"{cell['ratio'] / best:.2f}",
                f"{cell['tau']:.2f}", f"{cell['nodes']:.1f}", f"{cell['share']['draft']:.0%}",
                f"{cell['share']['forward']:.0%}", str(cell["equal_rows"]),
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
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--prompts", nargs="+", default=list(TEMPLATES), choices=list(TEMPLATES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4], help="of chains")
    parser.add_argument("--trees", nargs="*", default=_TREES, choices=_TREES)
    parser.add_argument("--expansion", type=int, nargs="+", default=[2, 2, 1, 1], help="of static trees")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16], help="of dynamic; of sequoia the most of them")
    parser.add_argument("--depth", type=int, default=5, help="of dynamic and sequoia")
    parser.add_argument("--top-k", type=int, default=4, help="of dynamic and sequoia")
    parser.add_argument("--prompts-per-row", type=int, default=3, help="prompts for each row of the batch, at least 8")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    target, tokenizer = load_model(arguments.model, dtype=arguments.dtype, device="cpu", compile=arguments.compile)
    console, rows, cells = Console(width=150), list[dict[str, Any]](), cells_of(arguments)
    with Progress(console=console, transient=True) as progress:
        for kind in arguments.prompts:
            for batch_size in arguments.batch_sizes:
                limit, new = max(8, arguments.prompts_per_row * batch_size), arguments.max_new_tokens
                requests = requests_of(arguments.data, TEMPLATES[kind], limit, new, target, tokenizer)
                engines = engines_of(cells, target, tokenizer, batch_size, arguments.backend)
                measured = measure(engines, requests, arguments.repeats, progress)
                for name, engine in engines.items():
                    measured[name]["nodes"] = engine.report.num_drafted / engine.report.num_row_steps
                    shape = getattr(engine.drafting.drafters[0].drafter, "shape", None)
                    measured[name]["acceptance"] = getattr(shape, "acceptance", None)
                rows.append({"prompts": kind, "batch_size": batch_size, "cells": measured})
                console.print(table_of(rows[-1:]))
                if arguments.out:
                    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(f"{arguments.model}, {target.dtype}, compile={arguments.compile}, {torch.get_num_threads()} threads")
    console.print(table_of(rows))


if __name__ == "__main__":
    main()
