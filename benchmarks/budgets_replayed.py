"""`benchmarks/budgets.py` without the noise: recorded acceptance and a fitted clock, so that only decisions differ.

    python benchmarks/budgets_replayed.py --model TARGET --draft-model DRAFT --data gsm8k.jsonl --out rows.json

What each drafter would have had right at every position is recorded once from a real run of the target. The clock is
one curve of step times for all cells of a kind of prompts and a drafter, fitted to real steps of this machine at two
batch sizes and three budgets. Then the real scheduler and the real policies run over both (`emssd.simulate`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

from budgets import TEMPLATES, engines_of, requests_of
from rich.console import Console
from rich.table import Table

from emssd.decoding.scheduler import ContinuousScheduler
from emssd.drafting import BudgetPolicy
from emssd.drafting.budget import FixedBudget
from emssd.metrics.stats import StepStats
from emssd.model import load_model
from emssd.simulate import FittedCurve, Simulator, warm_up
from emssd.simulate.commands import make_budget
from emssd.simulate.recording import logged_steps, record_trace

FITTED_AT = (4, 16)  # rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--data", required=True, help="JSONL file with a field 'question'")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--drafters", nargs="+", default=["llma", "draft_model", "cascade"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4, 7], help="fixed budgets")
    parser.add_argument("--prompts", type=int, default=64, help="the most that are used, at 3 for each row")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    target, tokenizer = load_model(arguments.model, dtype=arguments.dtype, device="cpu")
    console, rows = Console(width=150), list[dict[str, Any]]()
    table = Table("prompts", "drafter", "batch", "best fixed", "adaptive", "÷ best fixed")
    for kind, template in TEMPLATES.items():
        new = arguments.max_new_tokens
        requests = requests_of(arguments.data, template, arguments.prompts, new, target, tokenizer)
        prompts = [list(request.prompt_ids) for request in requests]
        for drafter in arguments.drafters:

            def engine(batch_size: int, drafter: str = drafter) -> Any:
                return engines_of(target, tokenizer, drafter, [7], batch_size, arguments.draft_model)["fixed 7"]

            trace = record_trace(engine(FITTED_AT[-1]), prompts, max_new_tokens=new)
            steps: list[StepStats] = []
            for batch_size in FITTED_AT:
                for num_tokens in (0, 2, 7):
                    measured = engine(batch_size)
                    with logged_steps(measured, FixedBudget(num_tokens)) as log:
                        measured.generate(prompts[: 2 * batch_size], 32)
                    steps += log
            curve = FittedCurve.fit(steps)
            for batch_size in arguments.batch_sizes:
                part = dataclasses.replace(trace, requests=trace.requests[: max(8, 3 * batch_size)])
                make = partial(ContinuousScheduler, batch_size)
                policies: dict[str, BudgetPolicy] = {"greedy": FixedBudget(0)}
                policies |= {f"fixed {length}": FixedBudget(length) for length in arguments.lengths}
                policies["adaptive"] = make_budget("adaptive", [])
                rates = {}
                for name, policy in policies.items():
                    warm_up(policy, part, make, curve)
                    rates[name] = Simulator(part, make(), policy, curve).run().report.tokens_per_second
                ratios = {name: rate / rates["greedy"] for name, rate in rates.items()}
                rows.append({"prompts": kind, "drafter": drafter, "batch_size": batch_size, "ratios": ratios})
                best = max((name for name in ratios if name.startswith("fixed")), key=ratios.__getitem__)
                cells = (f"{ratios[best]:.2f} ({best})", f"{ratios['adaptive']:.2f}")
                table.add_row(kind, drafter, str(batch_size), *cells, f"{ratios['adaptive'] / ratios[best]:.2f}")
    console.print(table)
    console.print("simulated over recorded acceptance; ratios to plain greedy decoding", highlight=False)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
