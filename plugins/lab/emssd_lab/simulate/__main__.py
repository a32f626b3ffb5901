"""``python -m emssd_lab.simulate``: runs without a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from emssd.cli.terminal import plain_console, steady
from emssd.decoding.options import DEFAULT_DRAFTER, EngineOptions
from emssd.decoding.scheduler import ContinuousScheduler, Scheduler, StaticScheduler
from emssd.drafting import BudgetPolicy
from emssd.errors import ConfigError
from emssd.hooks.registry import Registry
from emssd_lab.simulate.curves import PRESETS, Roofline
from emssd_lab.simulate.simulator import Simulator, summarize, summary_table, warm_up
from emssd_lab.simulate.trace_drafter import TreeDrafter, TreeLaw
from emssd_lab.simulate.traces import Trace, geometric_trace, load_trace, save_trace


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
    said = "simulate a run of a recorded or a made-up trace"
    _add_run(commands.add_parser("run", help=said, description=said))
    said = "record a trace of a model and drafter, prompts one a line"
    _add_record(commands.add_parser("record", help=said, description=said))
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
    budget, curve, trace = make_budget(options.budget, options.option), _curve(options.curve), _trace(options)
    drafters = None
    if options.branches is not None:
        law = TreeLaw(options.branches, options.chances or [[options.p]], options.seed)
        drafters = [TreeDrafter(trace, law, tells=options.tells)]
    warm_up(budget, trace, lambda: _scheduler(options), curve, drafters)
    simulator = Simulator(
        trace, _scheduler(options), budget, curve, max_kv_tokens=options.max_kv_tokens, drafters=drafters
    )
    summary = summarize(simulator.run(options.max_steps), f"{options.budget}, batch size {options.batch_size}")
    plain_console().print(summary_table(summary))
    if options.json is not None:
        _write(options.json, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _chances(text: str) -> list[list[float]]:
    return [[float(each) for each in level.split(",")] for level in text.split(";")]


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

    prompts = _prompts(options.prompts, options.limit)
    engine = Engine.from_pretrained(
        options.model, drafter=options.drafter, dtype=options.dtype, batch_size=options.batch_size
    )
    trace = record_trace(engine, prompts, max_new_tokens=options.new)
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


def _trace(options: argparse.Namespace) -> Trace:
    if options.trace is not None:
        return load_trace(options.trace)
    return geometric_trace(
        options.p,
        options.requests,
        num_speculative_tokens=options.depth,
        num_prompt=options.prompt,
        max_new_tokens=options.new,
        concentration=options.concentration,
        seed=options.seed,
    )


def _scheduler(options: argparse.Namespace) -> Scheduler:
    if options.batching == "static":
        return StaticScheduler(options.batch_size)
    return ContinuousScheduler(options.batch_size, options.max_step_tokens, worst_case=options.worst_case)


def _curve(name: str) -> Roofline:
    if name not in PRESETS:
        raise ConfigError(f"--curve is {name}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _prompts(path: Path | None, limit: int | None) -> list[str]:
    if path is None:
        from emssd.data.demo import prompts

        return [prompt.text for prompt in prompts(limit)]
    from emssd.data.records import content_of, text_in

    lines = text_in(*content_of(str(path), "--prompts ")).split("\n")
    return [line for line in lines if line.strip()][:limit]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    main()
