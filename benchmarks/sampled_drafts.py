"""How much of a draft is accepted where tokens are sampled: a draft model with the target's noise, and without.

    python benchmarks/sampled_drafts.py --model TARGET --draft-model DRAFT --data gsm8k.jsonl

``greedy`` drafts what is most probable, ``own noise`` draws with noise of its own, and ``same noise`` is emssd's way.
τ is tokens per row and step, over all seeds. Every row must be that of sampling without drafts. No time is measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from budgets import TEMPLATES, requests_of
from emssd_draft_model import DraftModelConfig, TreeKind
from emssd_draft_model.drafter import DraftModelDrafter
from emssd_draft_model.shapes import shape_of
from rich.console import Console
from rich.table import Table

from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.drafters import ModelDrafter
from emssd.drafting import Drafter
from emssd.model import CausalLMRunner, TargetModel, load_model
from emssd.plugins.builtin import FixedBudgetConfig
from emssd.plugins.registry import Registry
from emssd.sampling import SamplingParams
from emssd.sampling.choice import Node
from emssd.sequences import Request, Sequence


class Greedy(ModelDrafter):
    """Looks at no noise, and at no params."""

    def node_of(self, row: Sequence) -> Node:
        return Node(SamplingParams(temperature=0.0))


class OwnNoise(ModelDrafter):
    """Draws with noise that has nothing to do with the target's."""

    def node_of(self, row: Sequence) -> Node:
        node = super().node_of(row)
        return replace(node, key=~node.key & 2**64 - 1)


class SameNoise(ModelDrafter):
    """As it is."""


NOISES: dict[str, Any] = {"greedy": Greedy, "own noise": OwnNoise, "same noise": SameNoise}


def configs_of(arguments: argparse.Namespace) -> dict[str, DraftModelConfig]:
    """By name what a draft looks like."""
    shape: dict[str, Any] = {"depth": arguments.depth, "top_k": arguments.top_k}
    configs = {f"chain {k}": DraftModelConfig("", k) for k in arguments.lengths}
    configs["static"] = DraftModelConfig(tree=TreeKind.static, expansion=arguments.expansion)
    for error in arguments.errors:
        for nodes in arguments.nodes:
            name = f"dynamic {nodes}" + (f", error {error:g}" if len(arguments.errors) > 1 else "")
            configs[name] = DraftModelConfig(tree=TreeKind.dynamic, num_nodes=nodes, temperature=error, **shape)
    most = max(arguments.nodes)
    configs[f"sequoia {most}"] = DraftModelConfig(tree=TreeKind.sequoia, num_nodes=most, **shape)
    return configs


def make_drafter(config: DraftModelConfig, noise: Any, draft: TargetModel, batch_size: int) -> Drafter:
    shape = shape_of(config)
    spec = replace(draft.kv_cache_spec(batch_size), trees=shape is not None)
    runner = CausalLMRunner(draft, make_backend(spec, "ragged", Registry()))
    kind: Any = DraftModelDrafter if shape is None else ModelDrafter
    changed: Any = type(kind.__name__, (noise, kind), {})
    made: Drafter = changed(runner, draft.vocab_size, shape or config.num_speculative_tokens)
    return made


def texts(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {done.request_id: done.token_ids for done in engine.run(requests)}


def measure(engine: Engine, asked: list[list[Request]], expected: list[dict[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Over all seeds."""
    tokens, steps, drafted, equal = 0, 0, 0, set[str]()
    for requests, plain in zip(asked, expected, strict=True):
        found = texts(engine, requests)
        report = engine.report
        steps, drafted = steps + report.num_row_steps, drafted + report.num_drafted
        tokens += report.num_row_steps + report.num_accepted
        own = {name for name, text in plain.items() if found[name] == text}
        equal = own if requests is asked[0] else equal & own
    return {"tau": tokens / steps, "nodes": drafted / steps, "equal_rows": len(equal)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--data", required=True, help="JSONL file with a field 'question'")
    parser.add_argument("--dtype", default="float32", help="rows are equal for certain in float32 and float64")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 0.8, 1.0])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4], help="of chains")
    parser.add_argument("--expansion", type=int, nargs="+", default=[2, 2, 1, 1], help="of static trees")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16], help="of dynamic; of sequoia the most")
    parser.add_argument("--depth", type=int, default=5, help="of dynamic and sequoia")
    parser.add_argument("--top-k", type=int, default=4, help="of dynamic and sequoia")
    parser.add_argument("--errors", type=float, nargs="+", default=[0.6], help="drafter.temperature of dynamic")
    parser.add_argument("--noises", nargs="+", default=list(NOISES), choices=list(NOISES))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1, help="seeds")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    target, tokenizer = load_model(arguments.model, dtype=arguments.dtype, device="cpu")
    draft, _ = load_model(arguments.draft_model, dtype=arguments.dtype, device="cpu")
    options = EngineOptions(batch_size=arguments.batch_size, prefix_caching=False)
    console, rows, configs = Console(width=150), list[dict[str, Any]](), configs_of(arguments)
    prompts = requests_of(
        arguments.data, TEMPLATES["plain"], arguments.prompts, arguments.max_new_tokens, target, tokenizer
    )

    def engine_with(drafter: Any) -> Engine:
        return Engine.assemble(
            target, tokenizer, drafter=drafter, backend="ragged", budget=FixedBudgetConfig(), options=options
        )

    for temperature in arguments.temperatures:
        kinds = [SamplingParams(temperature, top_p=arguments.top_p, seed=seed) for seed in range(arguments.repeats)]
        asked = [[replace(prompt, sampling=kind) for prompt in prompts] for kind in kinds]
        expected = [texts(engine_with("none"), requests) for requests in asked]
        cells = {}
        for name, config in configs.items():
            for noise in arguments.noises:
                engine = engine_with(make_drafter(config, NOISES[noise], draft, arguments.batch_size))
                cells[f"{name}, {noise}"] = measure(engine, asked, expected)
        rows.append({"temperature": temperature, "top_p": arguments.top_p, "cells": cells})
        if arguments.out:
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    columns = [(row, noise) for row in rows for noise in arguments.noises]
    table = Table("draft", *(f"T={row['temperature']:g}, {noise}" for row, noise in columns), "equal rows")
    for name in configs:
        own = [row["cells"][f"{name}, {noise}"] for row, noise in columns]
        fewest = min(cell["equal_rows"] for cell in own)
        table.add_row(name, *(f"{cell['tau']:.2f}" for cell in own), f"{fewest} of {len(prompts)}")
    console.print(f"{arguments.model}, {target.dtype}, top_p={arguments.top_p:g}; τ, the target's own token included")
    console.print(table)


if __name__ == "__main__":
    main()
