"""What a compiled draft model takes for a chain in one call, beside a call for each token, in greedy decoding.

    python benchmarks/draft_chain.py --model MODEL --draft-model DRAFT --dtype float32

Milliseconds of drafting and of the whole step, with as many tokens drafted for each row in every step. Both ways and
plain decoding take turns in one process; medians of the turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.model import CausalLMRunner, load_model
from emssd.plugins.registry import Registry
from emssd.sequences import Request

WAYS = ("in one call", "a call for each token", "plain")


def measure(
    given: argparse.Namespace, target: Any, tokenizer: Any, batch_size: int, console: Console
) -> dict[str, Any]:
    """Medians of one batch size."""
    config = (
        Registry()
        .find("drafter", "draft_model")
        .config(path=str(given.draft_model), num_speculative_tokens=given.tokens)
    )
    options = EngineOptions(batch_size=batch_size, prefix_caching=False)
    engines = {
        way: Engine.assemble(
            target, tokenizer, drafter="none" if way == "plain" else config, backend="ragged", budget="fixed",
            options=options,
        )
        for way in WAYS
    }  # fmt: skip
    prompts = torch.randint(4, target.vocab_size, (batch_size, given.context)).tolist()
    requests = [Request(str(row), tuple(prompt), given.new, frozenset()) for row, prompt in enumerate(prompts)]
    run_chain, turns = CausalLMRunner.run_chain, []
    for _ in track(range(given.repeats + 1), f"batch {batch_size}", console=console):
        turn = {}
        for way, engine in engines.items():
            CausalLMRunner.run_chain = run_chain if way == WAYS[0] else lambda *_: None  # type: ignore[assignment, method-assign]
            for request in requests:
                engine.add(request)
            engine.step()  # the prompts
            engine.step()
            before, steps, start = engine.report.seconds.get("draft", 0.0), engine.report.num_steps, time.perf_counter()
            while engine.scheduler.has_work:
                engine.step()
            count = engine.report.num_steps - steps
            turn[f"step, {way}"] = (time.perf_counter() - start) / count * 1e3
            turn[f"draft, {way}"] = (engine.report.seconds["draft"] - before) / count * 1e3
        turns.append(turn)
    CausalLMRunner.run_chain = run_chain  # type: ignore[method-assign]
    medians = {name: statistics.median(turn[name] for turn in turns[1:]) for name in turns[0]}  # the first warms up
    return {"batch_size": batch_size} | medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model", default="demo-draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=4, help="drafted for each row")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=96, help="tokens generated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    console = Console()
    target, tokenizer = load_model(given.model, dtype=given.dtype, compile=True)
    rows = [measure(given, target, tokenizer, batch_size, console) for batch_size in given.batch_sizes]
    table = Table("batch", *(f"{what}, {way}" for what in ("draft", "step") for way in WAYS), title="milliseconds")
    for row in rows:
        each = (f"{row[f'{what}, {way}']:.2f}" for what in ("draft", "step") for way in WAYS)
        table.add_row(str(row["batch_size"]), *each)
    console.print(table)
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
