r"""Speed and acceptance of several engines over one model: drafters, budgets, trees, sampling, batching.

    python benchmarks/compare.py model.path=MODEL data=jsonl data.path=gsm8k.jsonl data.field=question batch_size=1,8 \
        --cell 'drafter=suffix' --cell 'chain of 4: drafter=draft_model drafter.path=DRAFT budget=fixed'

Options are those of `python -m emssd`; one with several values is swept. Each `--cell` adds its own, with or without a
label before them. The first cell, *plain*, has the options of `--plain`.

In each repeat, all engines decode the same prompts in turns of a tenth of a second, so that a machine that becomes
slower does so for all of them. A figure is a ratio to *plain*: the median of the ratios within each repeat, end to end,
and of the steps that compute no prompts (*decoding*). τ is tokens per row and step, drafted is drafted tokens per row
and step, and equal rows are those with the tokens of *plain*. With `--markdown`, the files that earlier calls wrote
become one Markdown table. With `--cold`, each repeat has new engines that nobody warmed up, each decodes all prompts in
one turn, and one more repeat that does not count goes before them: a short job.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from common import make_parser, save, show
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.progress import Progress

from emssd.cli.config import RunConfig, conf_dir, register_configs
from emssd.cli.intake import Failures, make_engine, prompts_of, to_requests
from emssd.cli.options import to_options
from emssd.decoding.engine import Engine
from emssd.decoding.warmup import warm_up
from emssd.hooks.registry import Registry
from emssd.metrics.stats import RunReport
from emssd.model.load.loading import ModelCache
from emssd.sequences import Request

SLICE = 0.1  # seconds that an engine has to itself before the next one goes on
COLUMNS = (
    "× plain", "spread", "× decoding", "spread",
    "tokens/s", "τ", "drafted", "draft", "forward", "batch in use", "steps", "equal rows",
)  # fmt: skip


def cells_of(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """The options of each cell, by its label."""
    cells = {"plain": shlex.split(arguments.plain)}
    for text in arguments.cell:
        label, colon, words = text.partition(": ")
        cells[label] = shlex.split(words if colon else text)
    return cells


def settings_of(words: Seq[str]) -> list[list[str]]:
    """One list of options for each combination of swept values."""
    (settings,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(list(words)), None)
    return [list(setting) for setting in settings]


def options_of(words: list[str], registry: Registry) -> RunConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_options(hydra.compose("config", words), registry)


def engines_of(options: dict[str, RunConfig], registry: Registry, models: ModelCache) -> dict[str, Engine]:
    """A new engine for the options of each cell."""
    return {name: make_engine(one, registry, models) for name, one in options.items()}


def measure(
    engines: dict[str, Engine],
    requests: dict[str, list[Request]],
    repeats: int,
    progress: Progress,
    renewed: Callable[[], dict[str, Engine]] | None = None,
) -> dict[str, Any]:
    """The figures of each engine; `requests` are its own, as cells may sample in different ways.

    With `renewed`, each repeat has the engines that it makes, and each runs its job as a whole: after a turn of others,
    an engine finds the processor's caches cold, which happens to a short job once, and not ten times a second.
    """
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    outputs: dict[str, dict[tuple[str, int], tuple[int, ...]]] = {}
    names = list(engines)
    for name, engine in engines.items():
        warm_up(engine, requests[name])
    for repeat in progress.track(range(repeats + (renewed is not None)), description="repeats"):
        engines = engines if renewed is None else renewed()
        for name, engine in engines.items():
            engine.report = RunReport()
            engine.runner.forget_prefixes()
            for request in requests[name]:
                engine.add(request)
        taken, outputs = dict.fromkeys(engines, 0.0), {name: {} for name in engines}
        waiting = names[repeat % len(names) :] + names[: repeat % len(names)]
        while waiting:
            for name in waiting:
                taken[name] += _decode_slice(engines[name], outputs[name], SLICE if renewed is None else math.inf)
            waiting = [name for name in waiting if engines[name].has_work]
        for name, duration in () if renewed and not repeat else taken.items():
            seconds[name].append(duration)
            rates[name].append(engines[name].report.decode_tokens_per_second)
    return {name: _figures(name, engine, seconds, rates, outputs) for name, engine in engines.items()}


def _decode_slice(engine: Engine, outputs: dict[tuple[str, int], tuple[int, ...]], seconds: float) -> float:
    """Let `engine` decode for so many `seconds`, and put finished rows into `outputs`. Returns the seconds it took."""
    start, taken = time.perf_counter(), 0.0
    while engine.has_work and taken < seconds:
        outputs.update({(row.request_id, row.request.sample): tuple(row.output_ids) for row in engine.step()})
        taken = time.perf_counter() - start
    return taken


def _figures(
    name: str, engine: Engine, seconds: dict[str, list[float]], rates: dict[str, list[float]], outputs: dict[str, Any]
) -> dict[str, Any]:
    rows, report = outputs[name], engine.report
    ratios = [plain / mine for plain, mine in zip(seconds["plain"], seconds[name], strict=True)]
    return {
        "seconds": seconds[name],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "decode_ratios": (decoding := [mine / plain for plain, mine in zip(rates["plain"], rates[name], strict=True)]),
        "decode_ratio": statistics.median(decoding),
        "tokens_per_second": sum(map(len, rows.values())) / statistics.median(seconds[name]),
        "tau": report.mean_acceptance_length,
        "drafted": report.num_drafted / report.num_row_steps,
        "share": {phase: value / report.total_seconds for phase, value in report.seconds.items()},
        "batch_fill": report.batch_fill,
        "steps": report.num_steps,
        "preempted": report.num_preempted,
        "kv_peak_mib": report.kv_usage.peak_held / 2**20,
        "prompt_tokens_adopted": report.num_adopted_tokens,
        "equal_rows": sum(rows[row] == tokens for row, tokens in outputs["plain"].items()),
    }


def line_of(name: str, cell: dict[str, Any]) -> list[str]:
    share = cell["share"]
    columns = [(cell["ratio"], cell["ratios"]), (cell["decode_ratio"], cell["decode_ratios"])]
    ratios = [text for one, all_ in columns for text in (f"{one:.2f}", f"{min(all_):.2f} – {max(all_):.2f}")]
    return [
        name, *ratios, f"{cell['tokens_per_second']:.0f}",
        f"{cell['tau']:.2f}", f"{cell['drafted']:.1f}", f"{share['draft']:.0%}", f"{share['forward']:.0%}",
        f"{cell['batch_fill']:.0%}", str(cell["steps"]), str(cell["equal_rows"]),
    ]  # fmt: skip


def markdown(files: Seq[str]) -> str:
    """Per cell and setting × plain end to end, × plain decoding, and τ; a column's title has its own options alone."""
    rows = [row for file in files for row in json.loads(Path(file).read_text(encoding="utf-8"))["rows"]]
    shared = set.intersection(*(set(row["options"]) for row in rows)) if len(rows) > 1 else set()
    titles = [", ".join(word for word in row["options"] if word not in shared) for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row["cells"]))
    lines = [["", *titles], ["---"] * (1 + len(rows))]
    for name in names:
        cells = [row["cells"].get(name) for row in rows]
        texts = [[f"{cell[key]:.2f}" for key in ("ratio", "decode_ratio", "tau")] if cell else [""] for cell in cells]
        lines.append([name, *(" · ".join(count) for count in texts)])
    equal = [[cell["equal_rows"] for cell in row["cells"].values()] for row in rows]
    wrong = sum(count < max(row) for row in equal for count in row)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\nCells with rows unlike plain: {wrong}"


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("options", nargs="*", help="of `python -m emssd`; values with commas between are swept")
    parser.add_argument("--cell", action="append", default=[], help="[LABEL: ]OPTIONS of one engine")
    parser.add_argument("--plain", default="drafter=none budget=fixed", help="options of the cell compared with")
    parser.add_argument("--prompts-per-row", type=int, help="in place of data.limit: as many for each row, at least 8")
    parser.add_argument("--cold", action="store_true", help="new engines in each repeat, with nothing learnt")
    parser.add_argument("--markdown", nargs="+", metavar="FILE", help="of `--out`; decodes nothing")
    arguments = parser.parse_intermixed_args()
    if arguments.markdown:
        print(markdown(arguments.markdown))
        return
    registry, models, rows = Registry(), ModelCache(), list[dict[str, Any]]()
    register_configs(registry)
    for setting in settings_of(["prefix_caching=false", *arguments.options]):
        requests = {}
        all_options = {name: options_of([*setting, *words], registry) for name, words in cells_of(arguments).items()}
        if arguments.prompts_per_row:
            for options in all_options.values():
                options.data.limit = max(8, arguments.prompts_per_row * options.batch_size)
        engines = engines_of(all_options, registry, models)
        for name, options in all_options.items():
            prompts = Failures(options.on_error).passed(prompts_of(options, registry))
            requests[name] = to_requests(options, engines[name], prompts, Failures(options.on_error))
        renewed = partial(engines_of, all_options, registry, models) if arguments.cold else None
        with Progress(transient=True) as progress:
            cells = measure(engines, requests, arguments.repeats, progress, renewed)
        rows.append({"options": setting, "cells": cells})
        show(" ".join(setting[1:]), ("", *COLUMNS), [line_of(name, cell) for name, cell in cells.items()])
        target = engines["plain"].target
        save(arguments.out, rows, device=str(target.device), dtype=target.dtype)


if __name__ == "__main__":
    main()
