"""Holds `emssd.simulate` to real runs: one recorded trace, replayed at other batch sizes and budgets, beside real runs.

    python benchmarks/simulate_agreement.py                                     # the embedded demo
    python benchmarks/simulate_agreement.py --model DIR --draft-model DIR --data FILE.jsonl \\
        --template "<s>Question: {question}\\nRestated:" --template "<s>Question: {question}\\nAnswer:"

Fixed budgets must agree in the number of steps, row-steps, new, computed and drafted tokens. The adaptive policy
decides by the time that steps take, which no two runs share: it is replayed with the recorded times, where it must
agree as well, and predicted with a step-time curve fitted to the real runs with fixed budgets at that batch size.
"""

from __future__ import annotations

import argparse
import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from emssd.data.demo import model_path
from emssd.data.demo import prompts as demo_prompts
from emssd.data.prompts import encode_prompts
from emssd.data.records import RecordsConfig, content_of, records_in, to_prompts
from emssd.decoding.engine import Engine
from emssd.decoding.options import Batching, EngineOptions
from emssd.decoding.scheduler import ContinuousScheduler
from emssd.decoding.warmup import warm_up
from emssd.drafting import BudgetPolicy
from emssd.drafting.budget import FixedBudget
from emssd.metrics.stats import RunReport, StepStats
from emssd.model import ModelOptions, TargetModel, load_model
from emssd.plugins.registry import Registry
from emssd.sequences import Request
from emssd.simulate import Simulator, Trace
from emssd.simulate.__main__ import make_budget
from emssd.simulate.curves import FittedCurve, StepCurve
from emssd.simulate.recording import logged_steps, record_trace
from emssd.simulate.simulator import warm_up as warm_up_simulated


def counts(report: RunReport) -> tuple[int, ...]:
    """The counts that must agree; accepted tokens may differ after an EOS, as a trace ends there."""
    return report.num_steps, report.num_row_steps, report.num_new_tokens, report.num_tokens, report.num_drafted


def compare(
    engine: Engine, trace: Trace, prompts: list[list[int]], limits: list[int], options: EngineOptions
) -> list[dict[str, Any]]:
    """Real and simulated runs of one engine at several budgets."""
    requests = [Request(str(i), tuple(ids), limit) for i, (ids, limit) in enumerate(zip(prompts, limits, strict=True))]
    make_scheduler = partial(ContinuousScheduler, options.batch_size, options.max_step_tokens)
    runs, steps = list[tuple[str, RunReport, RunReport]](), list[StepStats]()
    for name in ("none", "2", "all", "adaptive"):
        policy = _policy(name)
        with logged_steps(engine, policy):
            warm_up(engine, requests)
        warm = copy.deepcopy(policy)
        with logged_steps(engine, policy) as log:
            engine.generate(prompts, limits)
        real = engine.report
        if name == "adaptive":
            runs.append(("adaptive, recorded times", real, _replay(trace, make_scheduler(), warm, log)))
            policy, curve = _policy(name), FittedCurve.fit(steps)
            warm_up_simulated(policy, trace, make_scheduler, curve)
            runs.append(
                ("adaptive, fitted times", real, Simulator(trace, make_scheduler(), policy, curve).run().report)
            )
        else:
            steps += log
            runs.append((name, real, _replay(trace, make_scheduler(), warm, log)))
    rows = []
    for name, real, simulated in runs:
        per_step = [report.num_new_tokens / report.num_steps for report in (real, simulated)]
        rows.append(
            {
                "batch_size": options.batch_size,
                "budget": name,
                "real_tokens_per_step": per_step[0],
                "simulated_tokens_per_step": per_step[1],
                "tokens_per_step_difference": per_step[1] / per_step[0] - 1,
                "all_counts_equal": counts(real) == counts(simulated),
                "tokens_per_second_ratio": simulated.tokens_per_second / real.tokens_per_second,
            }
        )
    return rows


class RecordedTimes(StepCurve):
    """The times of a real run, step by step, to compare a policy that decides by time with what it did.

    Args:
        steps: of the run; a simulation that takes more steps ends with an `IndexError`.
    """

    def __init__(self, steps: list[StepStats]) -> None:
        self._steps = steps
        self._num_steps = 0

    def draft_seconds(self, stage: int, depth: int, num_tokens: int, num_kv_tokens: int) -> float:
        return self._steps[self._num_steps].stages[stage].seconds

    def verify_seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        step = self._steps[self._num_steps]
        self._num_steps += 1
        return sum(step.seconds.values()) - step.seconds["draft"]


def _replay(trace: Trace, scheduler: ContinuousScheduler, policy: BudgetPolicy, log: list[StepStats]) -> RunReport:
    """The simulated run in which step i takes as long as step i of the real one; at most as many steps."""
    return Simulator(trace, scheduler, policy, RecordedTimes(log)).run(len(log)).report


def _policy(name: str) -> Any:
    return make_budget(name, []) if name == "adaptive" else FixedBudget({"none": 0, "2": 2, "all": None}[name])


def _prompts(arguments: argparse.Namespace, template: str | None, target: TargetModel, tokenizer: Any) -> Any:
    if arguments.data is None:
        texts = [prompt.text for prompt in demo_prompts(arguments.limit)]
    else:
        config = RecordsConfig(template=template, limit=arguments.limit)
        texts = [prompt.text for prompt in to_prompts(records_in(*content_of(arguments.data)), config, "--data")]
    return encode_prompts(texts, tokenizer)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("prompts", "drafter", "batch", "budget", box=None, pad_edge=False)
    for name in ("tokens/step", "simulated", "difference", "counts", "tokens/s, simulated ÷ real"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["prompts"], row["drafter"], str(row["batch_size"]), row["budget"], f"{row['real_tokens_per_step']:.3f}",
            f"{row['simulated_tokens_per_step']:.3f}", f"{row['tokens_per_step_difference']:+.1%}",
            "equal" if row["all_counts_equal"] else "differ",
            f"{row['tokens_per_second_ratio']:.2f}" if "fitted" in row["budget"] else "",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="folder, hub id or 'demo'")
    parser.add_argument("--draft-model", default=str(model_path("draft")), help="for drafter=draft_model")
    parser.add_argument("--data", help="JSONL file; the demo's prompts by default")
    parser.add_argument("--template", action="append", help="as in data.template; repeatable, each is a setting")
    parser.add_argument("--limit", type=int, default=48, help="prompts")
    parser.add_argument(
        "--new", type=int, default=64, help="tokens of the longest outputs; others have 1, 2, 3 quarters"
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16], help="rows")
    parser.add_argument("--drafters", nargs="+", default=["llma", "draft_model", "cascade"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    target, tokenizer = load_model(ModelOptions(arguments.model, dtype=arguments.dtype, compile=False))
    registry, rows = Registry(), list[dict[str, Any]]()
    for template in arguments.template or [None]:
        prompts = _prompts(arguments, template, target, tokenizer)
        limits = [max(1, arguments.new * (1 + i % 4) // 4) for i in range(len(prompts))]
        for drafter in arguments.drafters:
            choice = registry.find("drafter", drafter).config()
            if drafter == "draft_model":
                choice.path = arguments.draft_model
            if drafter == "cascade":
                choice.options = {"draft_model": {"path": arguments.draft_model}}
            trace = None
            for batch_size in arguments.batch_sizes:
                options = EngineOptions(batch_size=batch_size, batching=Batching.continuous, prefix_caching=False)
                engine = Engine.assemble(target, tokenizer, drafter=choice, backend="ragged", options=options)
                trace = trace or record_trace(engine, prompts, max_new_tokens=limits)
                setting = {"prompts": "demo" if template is None else template.split("\n")[-1], "drafter": drafter}
                rows += [setting | row for row in compare(engine, trace, prompts, limits, options)]
    Console(width=140).print(_table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
