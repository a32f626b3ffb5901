"""What it saves to compute the common beginning of prompts once.

    python benchmarks/prefix_sharing.py --model TARGET

Each prompt is a header of random tokens, the same for all, and random tokens of its own. The jobs with and without
prefix caching are interleaved in one process. Each begins with nothing cached; a figure is the median of the repeats.
First tokens are timed from the beginning of the job, and averaged over its prompts.
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
from rich.table import Table

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.decoding.warmup import warm_up
from emssd.model import load_model
from emssd.sequences import Request

FIGURES = {
    "total_seconds": ".2f",
    "first_token_seconds": ".2f",
    "prompt_tokens_computed": ",.0f",
    "kv_peak_mib": ".1f",
}


def requests_of(count: int, header: int, own: int, new: int, vocab_size: int) -> list[Request]:
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab_size, (length,), generator=generator).tolist())

    shared = text(header)
    return [Request(str(number), (*shared, *text(own)), new) for number in range(count)]


def decode(engine: Engine, requests: list[Request]) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Figures of one job that begins with nothing cached, and its tokens by request id."""
    engine.runner.forget_prefixes()
    rows = [engine.row(request) for request in requests]
    for row in rows:
        engine.scheduler.add(row)
    start, first, waiting = time.perf_counter(), dict[str, float](), list(rows)
    before = engine.report.num_adopted_tokens
    while engine.has_work:
        engine.step()
        now = time.perf_counter() - start
        first |= {row.request_id: now for row in waiting if row.output_ids}
        waiting = [row for row in waiting if not row.output_ids]
    adopted = engine.report.num_adopted_tokens - before
    figures = {
        "total_seconds": time.perf_counter() - start,
        "first_token_seconds": statistics.mean(first.values()),
        "prompt_tokens_computed": sum(len(request.prompt_ids) for request in requests) - adopted,
        "kv_peak_mib": engine.report.kv_usage.peak_held / 2**20,
    }
    return figures, {row.request_id: row.output_ids for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="ragged")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--header", type=int, default=512, help="tokens that all prompts begin with")
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt's own")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()

    target, tokenizer = load_model(given.model, device=given.device)
    requests = requests_of(given.prompts, given.header, given.own, given.max_new_tokens, target.vocab_size)
    engines = {
        caching: Engine.assemble(
            target,
            tokenizer,
            drafter=given.drafter,
            backend=given.backend,
            options=EngineOptions(batch_size=given.batch_size, prefix_caching=caching),
        )
        for caching in (False, True)
    }
    for engine in engines.values():
        warm_up(engine, requests)
    runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    outputs: dict[bool, dict[str, list[int]]] = {}
    for _ in range(given.repeats):
        for caching, engine in engines.items():
            figures, outputs[caching] = decode(engine, requests)
            runs[caching].append(figures)
    equal = sum(outputs[False][name] == tokens for name, tokens in outputs[True].items())
    medians = {caching: {name: statistics.median(run[name] for run in done) for name in FIGURES}
               for caching, done in runs.items()}  # fmt: skip
    show(medians)
    print(f"{equal} of {len(requests)} outputs are equal")
    if given.out is not None:
        row: dict[str, Any] = {"equal_rows": equal, "options": {k: str(v) for k, v in vars(given).items()}}
        row["without"], row["with"] = medians[False], medians[True]
        given.out.write_text(json.dumps([row], indent=1) + "\n")


def show(medians: dict[bool, dict[str, float]]) -> None:
    table = Table("", "without", "with prefix caching", "ratio")
    for name, form in FIGURES.items():
        without, shared = medians[False][name], medians[True][name]
        table.add_row(name, format(without, form), format(shared, form), f"{without / shared:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
