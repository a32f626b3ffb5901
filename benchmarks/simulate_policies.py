"""Fixed and adaptive draft budgets at sizes that these machines cannot run: a 70B roofline, up to thousands of rows.

    out=docs/results/simulated_policies
    python benchmarks/simulate_policies.py --plot $out.png --json $out.json

A simulation: the scheduler and the policies are the real ones, the step times a roofline's (`emssd.simulate.presets`),
and acceptance is drawn by a law, each request with a p of its own. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from emssd.decoding.scheduler import ContinuousScheduler
from emssd.drafting import BudgetPolicy
from emssd.drafting.budget import FixedBudget
from emssd.simulate import PRESETS, Simulator, geometric_trace, summarize, summary_table, warm_up
from emssd.simulate.commands import make_budget

SETTINGS = {"free drafts (retrieval)": "70b-8xh100", "drafts of a 1B model": "70b-8xh100-draft-1b"}
BATCH_SIZES = (1, 8, 32, 128, 512, 2048)  # rows
FIXED = (0, 1, 2, 4, 7)  # drafted tokens
MEAN_P, CONCENTRATION, DEPTH = 0.6, 4.0, 7
PROMPT, NEW, WAVES = 256, 200, 2  # tokens, tokens, requests per row of the batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="draw the ratios to greedy there")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rates: dict[str, dict[str, list[tuple[int, float]]]] = {}
    rows: list[dict[str, Any]] = []
    for setting, preset in SETTINGS.items():
        policies: dict[str, list[tuple[int, float]]] = {}
        for batch_size in BATCH_SIZES:
            trace = geometric_trace(
                MEAN_P,
                max(WAVES * batch_size, 16),
                num_speculative_tokens=DEPTH,
                num_prompt=PROMPT,
                max_new_tokens=NEW,
                concentration=CONCENTRATION,
                seed=arguments.seed,
            )
            makers: dict[str, BudgetPolicy] = {f"fixed {n}" if n else "greedy": FixedBudget(n) for n in FIXED}
            makers["adaptive"] = make_budget("adaptive", [])
            summaries = []
            start = time.perf_counter()
            for name, policy in makers.items():
                make = partial(ContinuousScheduler, batch_size, 2048 + (1 + DEPTH) * batch_size)
                warm_up(policy, trace, make, PRESETS[preset])
                run = Simulator(trace, make(), policy, PRESETS[preset]).run()
                summaries.append(summarize(run, name))
                policies.setdefault(name, []).append((batch_size, float(summaries[-1]["tokens_per_second"])))
                rows.append({"setting": setting, "batch_size": batch_size} | summaries[-1])
            table = summary_table(summaries)
            table.caption = f"{setting}, {batch_size} rows; simulated in {time.perf_counter() - start:.1f} s"
            Console(width=120).print(table)
        rates[setting] = policies
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        title = (
            "Simulated, not measured: 70B in bfloat16 on 8 H100 (roofline), continuous batching, "
            f"p of each request from Beta({MEAN_P * CONCENTRATION:g}, {(1 - MEAN_P) * CONCENTRATION:g})"
        )
        draw(rates, arguments.plot, title)


def draw(rates: dict[str, dict[str, list[tuple[int, float]]]], path: Path, title: str) -> None:
    """Throughput by batch size as a ratio to greedy, one panel per setting; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(rates), 4.2), dpi=110, layout="constrained")
    panels = np.ravel(figure.subplots(1, len(rates)))
    for panel, (setting, policies) in zip(panels, rates.items(), strict=True):
        base = dict(policies["greedy"])
        for color, (policy, pairs) in enumerate(policies.items()):
            sizes, ratios = zip(*((size, rate / base[size]) for size, rate in pairs), strict=True)
            style: dict[str, Any] = {"linewidth": 1.2, "marker": "o", "ms": 3.5, "color": f"C{color}"}
            if policy == "adaptive":
                style = {"linewidth": 2.4, "marker": "s", "ms": 5, "color": "black"}
            panel.plot(sizes, ratios, label=policy, **style)
        panel.set(title=setting, xlabel="batch size / rows", ylabel="simulated tokens/s, ratio to greedy")
        panel.set_xscale("log", base=2)
        ticks = sorted(base)
        panel.set_xticks(ticks, [str(size) for size in ticks], rotation=45)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[-1].legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


if __name__ == "__main__":
    main()
