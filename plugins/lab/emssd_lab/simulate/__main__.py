"""``python -m emssd_lab.simulate``: runs without a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from rich.table import Table

from emssd.cli.terminal import plain_console, steady
from emssd.decoding.options import DEFAULT_DRAFTER, EngineOptions
from emssd.decoding.scheduler import ContinuousScheduler, Scheduler, StaticScheduler
from emssd.drafting import BudgetPolicy
from emssd.errors import ConfigError
from emssd.hooks.registry import Registry
from emssd_lab.simulate.curves import PRESETS
from emssd_lab.simulate.simulator import Simulator, warm_up
from emssd_lab.simulate.trace_drafter import TraceDrafter, TreeLaw
from emssd_lab.simulate.traces import geometric_trace, load_trace, save_trace

_FIGURES = {  # under the names of docs/metrics.md, and if the table shows it: its name there and its format
    "tokens_per_second": ("tokens/s", ",.1f"),
    "tokens_per_step": ("tokens/step", ",.2f"),
    "num_steps": ("steps", ",d"),
    "num_new_tokens": ("new tokens", ",d"),
    "num_computed_tokens": ("", ""),
    "mean_acceptance_length": ("τ̄", ".2f"),
    "mean_draft_length": ("drafted", ".2f"),
    "padding_ratio": ("δ̄/τmax", ".1%"),
    "batch_fill": ("fill", ".1%"),
    "num_preempted": ("preempted", ",d"),
    "seconds": ("seconds", ".2f"),
}


@steady("emssd_lab.simulate")
def main(arguments: Seq[str] | None = None) -> None:
    """Parse the command line and do it."""
    parsed = make_parser().parse_args(arguments)
    parsed.action(parsed)


def make_parser() -> argparse.ArgumentParser:
    """The command line; what it parses has an ``action`` to call with the result."""
    parser = argparse.ArgumentParser(
        prog="python -m emssd_lab.simulate",
        description="Speculative decoding without a model: acceptance traces through the real scheduler and budget "
        "policies, with a step-time curve. All seconds are simulated. See docs/simulator.md.",
        epilog="COMMAND --help tells the options of a command.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = "simulate a run of a recorded or a made-up trace"
    _add_run(commands.add_parser("run", help=run, description=run))
    record = "record a trace of a model and drafter, prompts one a line"
    _add_record(commands.add_parser("record", help=record, description=record))
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.set_defaults(action=_run)
    trace = run.add_argument_group("what is decoded").add_argument
    trace("--trace", type=Path, metavar="FILE", help="a recorded trace; without it, one is made up of:")
    trace("--p", type=float, default=0.7, help="probability that a drafted token is right (default: 0.7)")
    trace("--concentration", type=float, metavar="C", help="give each request a p of its own, from a Beta "
                       "distribution of mean p and parameters of sum C (default: all alike)")  # fmt: skip
    trace("--requests", type=int, default=256, metavar="N", help="number of requests (default: 256)")
    trace("--prompt", type=int, default=128, metavar="N", help="tokens of each prompt (default: 128)")
    trace("--new", type=int, default=128, metavar="N", help="tokens of each output (default: 128)")
    trace("--depth", type=int, default=4, metavar="K", help="tokens that the drafter proposes (default: 4)")
    trace("--branches", type=_numbers, metavar="K,K,…", help="draft token trees with so many children by "
                       "level, in the place of chains")  # fmt: skip
    trace("--chances", type=_chances, metavar="P,P,…[;P,P,…]", help="by rank, how likely a child is "
                       "right; after a semicolon those of the next level (default: --p, and then none)")  # fmt: skip
    trace("--tells", action="store_true", help="trees come with the true chances as confidence")
    trace("--seed", type=int, default=0, help="of the trace (default: 0)")
    how = run.add_argument_group("how").add_argument
    how("--batch-size", type=int, default=32, metavar="B", help="rows decoded together (default: 32)")
    how("--batching", choices=["continuous", "static"], default="continuous", help="default: continuous")
    how("--max-step-tokens", type=int, default=512, metavar="N", help="tokens of a step before prompts "
                     "are cut into pieces, continuous only (default: 512)")  # fmt: skip
    how("--worst-case", action="store_true", help="admit rows only if all could grow to their full length")
    how("--max-kv-tokens", type=int, metavar="N", help="tokens that the KV cache holds (default: no limit)")
    how("--budget", default="fixed", metavar="POLICY", help="fixed (default), adaptive, or a plugin's")
    how("--option", action="append", default=[], metavar="NAME=VALUE", help="of the policy; repeatable, "
                     "as in --budget fixed --option num_tokens=2")  # fmt: skip
    how("--curve", default="70b-8xh100", metavar="CURVE", help="step times, by a roofline, which is no "
                     f"measurement: {', '.join(PRESETS)} (default: 70b-8xh100)")  # fmt: skip
    how("--max-steps", type=int, metavar="N", help="stop after so many steps (default: when all is done)")
    run.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


def _run(options: argparse.Namespace) -> None:
    EngineOptions(options.batch_size, max_step_tokens=options.max_step_tokens)  # which checks them
    budget = make_budget(options.budget, options.option)
    if options.curve not in PRESETS:
        raise ConfigError(f"--curve is {options.curve}; choose one of {', '.join(PRESETS)}")
    curve, drafters = PRESETS[options.curve], None
    trace = load_trace(options.trace) if options.trace is not None else geometric_trace(
        options.p, options.requests, num_speculative_tokens=options.depth, num_prompt=options.prompt,
        max_new_tokens=options.new, concentration=options.concentration, seed=options.seed,
    )  # fmt: skip
    if options.branches is not None:
        law = TreeLaw(options.branches, options.chances or [[options.p]], options.seed)
        drafters = [TraceDrafter(trace, law=law, tells=options.tells)]

    def scheduler() -> Scheduler:
        if options.batching == "static":
            return StaticScheduler(options.batch_size)
        return ContinuousScheduler(options.batch_size, options.max_step_tokens, worst_case=options.worst_case)

    warm_up(budget, trace, scheduler, curve, drafters)
    simulator = Simulator(trace, scheduler(), budget, curve, max_kv_tokens=options.max_kv_tokens, drafters=drafters)
    report = simulator.run(options.max_steps).report
    figures = report.metrics() | {  # of all steps, prompts included, as no other figure of seconds is
        "tokens_per_step": report.num_new_tokens / max(report.num_steps, 1), "seconds": report.total_seconds,
    }  # fmt: skip
    label = f"{options.budget}, batch size {options.batch_size}"
    table = Table("simulated, not measured", title=label, title_justify="left", title_style="bold")
    table.add_column(justify="right")
    for name, (column, form) in _FIGURES.items():
        if column:
            table.add_row(column, format(figures[name], form))
    plain_console().print(table)
    if options.json is not None:
        shown = {"label": label} | {name: figures[name] for name in _FIGURES}
        try:
            options.json.write_text(json.dumps(shown, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{options.json} cannot be written: {error.strerror}") from error


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _chances(text: str) -> list[list[float]]:
    return [[float(chance) for chance in level.split(",")] for level in text.split(";")]


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=_record)
    record = parser.add_argument
    record("out", type=Path, metavar="TRACE", help="file to write the trace to")
    record("--model", default="demo", help="folder, hub id, or demo (default: demo)")
    record("--drafter", default=DEFAULT_DRAFTER, help="a drafter's name (default: %(default)s)")
    record("--prompts", type=Path, metavar="FILE", help="texts, one a line (default: the demo's prompts)")
    record("--limit", type=int, metavar="N", help="use only so many prompts (default: all)")
    record("--new", type=int, default=128, metavar="N", help="most tokens of each output (default: 128)")
    record("--batch-size", type=int, default=8, metavar="B", help="rows decoded together (default: 8)")
    record("--dtype", default="auto", help="float32, bfloat16, …; float32 replays exactly (default: auto)")


def _record(options: argparse.Namespace) -> None:
    from emssd.decoding.engine import Engine
    from emssd_lab.simulate.recording import record_trace

    if options.prompts is None:
        from emssd.data.demo import prompts

        texts = [prompt.text for prompt in prompts(options.limit)]
    else:
        from emssd.data.records import content_of, text_in

        lines = text_in(*content_of(str(options.prompts), "--prompts ")).split("\n")
        texts = [line for line in lines if line.strip()][: options.limit]
    engine = Engine.from_pretrained(
        options.model, drafter=options.drafter, dtype=options.dtype, batch_size=options.batch_size
    )
    trace = record_trace(engine, texts, max_new_tokens=options.new)
    save_trace(trace, options.out)
    plain_console().print(f"{len(trace)} requests, {sum(row.output_length for row in trace)} positions: {options.out}")


def make_budget(name: str, options: list[str]) -> BudgetPolicy:
    """The policy `name` with options such as ``num_tokens=2``."""
    values: dict[str, Any] = {}
    for option in options:
        key, _, text = option.partition("=")
        try:
            values[key] = json.loads(text)
        except ValueError:
            raise ConfigError(f"--option {option}: {text!r} is no number; give NAME=NUMBER, or NAME=null") from None
    registry = Registry()
    config = registry.configured("budget", name, values)
    policy: BudgetPolicy = registry.build("budget", registry.find("budget", name), config)
    return policy


if __name__ == "__main__":
    main()
