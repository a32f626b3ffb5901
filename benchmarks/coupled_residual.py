"""Accepted tokens per step with shared noise (``coupled``) and with the rejection rules (``residual``), by temperature.

    python benchmarks/coupled_residual.py --model TARGET --draft-model DRAFT --data gsm8k.jsonl

Each method drafts as suits it: coupled a chain, a static tree and a dynamic one; residual children drawn without
replacement, at every node (``rsd_c``, of which a chain is the narrowest) or on the best ways (``rsd_s``). τ is tokens
per row and step, over all seeds. No time is measured. Coupled rows must be those of plain sampling; those of residual
are another draw, so that for them no number of equal rows is given.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from budgets import TEMPLATES, requests_of
from emssd_draft_model import DraftModelConfig, TreeKind
from rich.console import Console
from rich.table import Table

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.model import load_model
from emssd.plugins.builtin import FixedBudgetConfig
from emssd.plugins.registry import Registry
from emssd.sampling import SamplingParams
from emssd.sequences import Request

METHODS = ("coupled", "residual")


def drafts_of(method: str, arguments: argparse.Namespace) -> dict[str, DraftModelConfig]:
    """By name what a draft looks like."""
    path, expansion, length = arguments.draft_model, arguments.expansion, arguments.length
    if method == "residual":
        beam: dict[str, Any] = {"width": arguments.width, "depth": arguments.depth}
        return {
            f"chain {length}": DraftModelConfig(path, tree=TreeKind.rsd_c, expansion=[1] * length),
            f"rsd_c {expansion}": DraftModelConfig(path, tree=TreeKind.rsd_c, expansion=expansion),
            f"rsd_s {arguments.width}×{arguments.depth}": DraftModelConfig(path, tree=TreeKind.rsd_s, **beam),
        }
    shape: dict[str, Any] = {"num_nodes": arguments.nodes, "depth": arguments.depth, "top_k": arguments.width}
    return {
        f"chain {length}": DraftModelConfig(path, length),
        f"static {expansion}": DraftModelConfig(path, tree=TreeKind.static, expansion=expansion),
        f"dynamic {arguments.nodes}": DraftModelConfig(path, tree=TreeKind.dynamic, **shape),
    }


def params_of(method: str, arguments: argparse.Namespace, temperature: float, seed: int) -> SamplingParams:
    """How tokens are drawn."""
    options: dict[str, Any] = {"top_p": arguments.top_p, "seed": seed}
    return SamplingParams(temperature, **options, **({"method": "residual"} if method == "residual" else {}))


def decode(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {done.request_id: done.token_ids for done in engine.run(requests)}


def measure(
    engine: Engine, asked: list[list[Request]], plain: list[dict[str, tuple[int, ...]]] | None
) -> dict[str, Any]:
    """Over all seeds; `plain` are the texts that every row must have, if any."""
    steps, accepted, drafted, equal = 0, 0, 0, 0
    for number, requests in enumerate(asked):
        found = decode(engine, requests)
        report = engine.report
        steps, accepted = steps + report.num_row_steps, accepted + report.num_accepted
        drafted += report.num_drafted
        if plain is not None:
            equal += sum(found[name] == text for name, text in plain[number].items())
    found_rows = {} if plain is None else {"equal_rows": equal}
    return {"tau": 1 + accepted / steps, "nodes": drafted / steps} | found_rows


def table_of(rows: list[dict[str, Any]], num_texts: int) -> Table:
    table = Table("T", "method", "draft", "τ", "nodes", f"equal rows of {num_texts}")
    for row in rows:
        for cell in row["cells"].values():
            table.add_row(
                f"{row['temperature']:g}", cell["method"], cell["draft"], f"{cell['tau']:.2f}", f"{cell['nodes']:.1f}",
                str(cell.get("equal_rows", "–")),
            )  # fmt: skip
        table.add_section()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--data", required=True, help="JSONL file with a field 'question'")
    parser.add_argument("--dtype", default="float32", help="rows are equal for certain in float32 and float64")
    parser.add_argument("--compile", action="store_true", help="with model.compile=true")
    parser.add_argument("--backend", default="ragged")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 0.8, 1.0])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--length", type=int, default=4, help="of chains")
    parser.add_argument("--expansion", type=int, nargs="+", default=[2, 2, 1, 1], help="of static and rsd_c")
    parser.add_argument("--nodes", type=int, default=10, help="of dynamic")
    parser.add_argument("--width", type=int, default=4, help="of rsd_s, and the top_k of dynamic")
    parser.add_argument("--depth", type=int, default=4, help="of dynamic and rsd_s")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="seeds")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    target, tokenizer = load_model(arguments.model, dtype=arguments.dtype, device="cpu", compile=arguments.compile)
    registry, options = Registry(), EngineOptions(batch_size=arguments.batch_size, prefix_caching=False)
    limit, new = arguments.prompts, arguments.max_new_tokens
    prompts = requests_of(arguments.data, TEMPLATES["plain"], limit, new, target, tokenizer)

    def engine_with(drafter: Any) -> Engine:
        return Engine.assemble(
            target, tokenizer, drafter=drafter, backend=arguments.backend, budget=FixedBudgetConfig(),
            options=options, registry=registry,
        )  # fmt: skip

    def asked(method: str, temperature: float) -> list[list[Request]]:
        kinds = [params_of(method, arguments, temperature, seed) for seed in range(arguments.repeats)]
        return [[replace(prompt, sampling=kind) for prompt in prompts] for kind in kinds]

    console, rows = Console(width=150), list[dict[str, Any]]()
    for temperature in arguments.temperatures:
        plain = [decode(engine_with("none"), requests) for requests in asked("coupled", temperature)]
        cells: dict[str, dict[str, Any]] = {}
        for method in arguments.methods:
            for name, config in drafts_of(method, arguments).items():
                right = plain if method == "coupled" else None
                cell = measure(engine_with(config), asked(method, temperature), right)
                cells[f"{method} {name}"] = {"method": method, "draft": name} | cell
        rows.append({"temperature": temperature, "top_p": arguments.top_p, "cells": cells})
        if arguments.out:
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(f"{arguments.model}, {target.dtype}, top_p={arguments.top_p:g}; τ, the target's own token included")
    console.print(table_of(rows, len(prompts) * arguments.repeats))


if __name__ == "__main__":
    main()
