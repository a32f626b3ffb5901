"""The commands of ``python -m emssd.simulate``: their options, and what they do."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emssd.decoding.options import DEFAULT_DRAFTER
from emssd.decoding.scheduler import ContinuousScheduler, Scheduler, StaticScheduler
from emssd.drafting import BudgetPolicy
from emssd.drafting.budget import FixedBudget
from emssd.errors import ConfigError
from emssd.errors.terminal import plain_console
from emssd.plugins.registry import Registry
from emssd.simulate.curves import PRESETS, FittedCurve, StepCurve, load_curve
from emssd.simulate.simulator import Simulator, summarize, summary_table, warm_up
from emssd.simulate.trace_drafter import TreeDrafter, TreeLaw
from emssd.simulate.traces import Trace, geometric_trace, load_trace, save_trace

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_record", "add_run", "make_budget"]


def add_run(subparsers: Subparsers) -> None:
    """``run``: one simulated run."""
    parser = _command(subparsers, "run", _run, "simulate a run of a recorded or a made-up trace")
    trace = parser.add_argument_group("what is decoded")
    trace.add_argument("--trace", type=Path, metavar="FILE", help="a recorded trace; without it, one is made up of:")
    trace.add_argument("--p", type=float, default=0.7, help="probability that a drafted token is right (default: 0.7)")
    trace.add_argument("--concentration", type=float, metavar="C", help="give each request a p of its own, from a Beta "
                       "distribution of mean p and parameters of sum C (default: all alike)")  # fmt: skip
    trace.add_argument("--requests", type=int, default=256, metavar="N", help="number of requests (default: 256)")
    trace.add_argument("--prompt", type=int, default=128, metavar="N", help="tokens of each prompt (default: 128)")
    trace.add_argument("--new", type=int, default=128, metavar="N", help="tokens of each output (default: 128)")
    trace.add_argument(
        "--depth", type=int, default=4, metavar="K", help="tokens that the drafter proposes (default: 4)"
    )
    trace.add_argument("--branches", type=_numbers, metavar="K,K,…", help="draft token trees with so many children by "
                       "level, in the place of chains")  # fmt: skip
    trace.add_argument("--chances", type=_chances, metavar="P,P,…[;P,P,…]", help="by rank, how likely a child is "
                       "right; after a semicolon those of the next level (default: --p, and then none)")  # fmt: skip
    trace.add_argument("--tells", action="store_true", help="trees come with the true chances as confidence")
    trace.add_argument("--seed", type=int, default=0, help="of the trace (default: 0)")
    how = parser.add_argument_group("how")
    how.add_argument("--batch-size", type=int, default=32, metavar="B", help="rows decoded together (default: 32)")
    how.add_argument("--batching", choices=["continuous", "static"], default="continuous", help="default: continuous")
    how.add_argument("--max-step-tokens", type=int, default=512, metavar="N", help="tokens of a step before prompts "
                     "are cut into pieces, continuous only (default: 512)")  # fmt: skip
    how.add_argument("--worst-case", action="store_true", help="admit rows only if all could grow to their full length")
    how.add_argument(
        "--max-kv-tokens", type=int, metavar="N", help="tokens that the KV cache holds (default: no limit)"
    )
    how.add_argument("--budget", default="fixed", metavar="POLICY", help="fixed (default), adaptive, or a plugin's")
    how.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the policy; repeatable, "
                     "as in --budget fixed --option num_tokens=2")  # fmt: skip
    how.add_argument("--curve", default="70b-8xh100", metavar="CURVE", help="step times: file of `record --curve`, or "
                     f"a roofline, which is no measurement: {', '.join(PRESETS)} (default: 70b-8xh100)")  # fmt: skip
    how.add_argument("--max-steps", type=int, metavar="N", help="stop after so many steps (default: when all is done)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


def _run(options: argparse.Namespace) -> None:
    budget, curve, trace = make_budget(options.budget, options.option), _curve(options.curve), _trace(options)
    drafters = _tree_drafters(options, trace)
    warm_up(budget, trace, lambda: _scheduler(options), curve, drafters)
    simulator = Simulator(
        trace, _scheduler(options), budget, curve, max_kv_tokens=options.max_kv_tokens, drafters=drafters
    )
    summary = summarize(simulator.run(options.max_steps), f"{options.budget}, batch size {options.batch_size}")
    plain_console().print(summary_table([summary]))
    if options.json is not None:
        _write(options.json, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")


def _tree_drafters(options: argparse.Namespace, trace: Trace) -> list[TreeDrafter] | None:
    if options.branches is None:
        return None
    law = TreeLaw(options.branches, options.chances or [[options.p]], options.seed)
    return [TreeDrafter(trace, law, tells=options.tells)]


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _chances(text: str) -> list[list[float]]:
    return [[float(each) for each in level.split(",")] for level in text.split(";")]


def add_record(subparsers: Subparsers) -> None:
    """``record``: the trace of a model, and on request its step-time curve."""
    parser = _command(subparsers, "record", _record, "record a trace of a model and drafter, prompts one a line")
    parser.add_argument("out", type=Path, metavar="TRACE", help="file to write the trace to")
    parser.add_argument("--model", default="demo", help="folder, hub id, or demo (default: demo)")
    parser.add_argument("--drafter", default=DEFAULT_DRAFTER, help="a drafter's name (default: %(default)s)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="texts, one a line (default: the demo's prompts)")
    parser.add_argument("--limit", type=int, metavar="N", help="use only so many prompts (default: all)")
    parser.add_argument("--new", type=int, default=128, metavar="N", help="most tokens of each output (default: 128)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="B", help="rows decoded together (default: 8)")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, …; float32 replays exactly (default: auto)")
    parser.add_argument("--curve", type=Path, metavar="FILE", help="decode at three budgets more and write the "
                        "step-time curve of this machine there")  # fmt: skip


def _record(options: argparse.Namespace) -> None:
    from emssd.decoding.engine import Engine
    from emssd.simulate.recording import logged_steps, record_trace

    prompts = _prompts(options.prompts, options.limit)
    engine = Engine.from_pretrained(
        options.model, drafter=options.drafter, dtype=options.dtype, batch_size=options.batch_size
    )
    trace = record_trace(engine, prompts, max_new_tokens=options.new)
    save_trace(trace, options.out)
    plain_console().print(f"{len(trace)} requests, {sum(row.output_length for row in trace)} positions: {options.out}")
    if options.curve is not None:
        steps = []
        longest = max(trace.num_speculative_tokens)
        for depth in (0, longest // 2, longest):
            with logged_steps(engine, FixedBudget(depth)) as log:
                engine.generate(prompts, max_new_tokens=options.new)
            steps += log
        FittedCurve.fit(steps).save(options.curve)
        plain_console().print(f"step-time curve of {len(steps)} steps: {options.curve}")


def make_budget(name: str, options: list[str]) -> BudgetPolicy:
    """The policy `name` with options such as ``num_tokens=2``. Raises PluginError: no such policy; or ConfigError: no
    such option, or a value that is no number.
    """
    registry = Registry()
    plugin, config = registry.resolve("budget", name)
    known = [field.name for field in dataclasses.fields(plugin.config)]
    for option in options:
        key, _, text = option.partition("=")
        if key not in known:
            raise ConfigError(f"budget {name!r} has no option {key!r}; it has {', '.join(known) or 'none'}")
        try:
            setattr(config, key, json.loads(text))
        except ValueError:
            raise ConfigError(f"--option {option}: {text!r} is no number; give NAME=NUMBER, or NAME=null") from None
    policy: BudgetPolicy = registry.build("budget", plugin, config)
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


def _curve(name: str) -> StepCurve:
    if name in PRESETS:
        return PRESETS[name]
    if not Path(name).is_file():
        raise ConfigError(f"--curve {name}: neither a file nor a preset; presets are {', '.join(PRESETS)}")
    return load_curve(Path(name))


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


def _command(subparsers: Subparsers, name: str, action: Any, help_text: str) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=help_text, description=help_text)
    parser.set_defaults(action=action)
    return parser
