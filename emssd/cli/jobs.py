"""The runs of one command: a single one, those of a sweep with their table, or those of an experiment."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.table import Table

from emssd.cli.config import RunConfig
from emssd.cli.lines_file import whole_file
from emssd.cli.progress import time_left
from emssd.cli.terminal import plain_console
from emssd.decoding.options import OnDrafterError
from emssd.errors import ConfigError, EmssdError, GroupError
from emssd.hooks.registry import Registry

if TYPE_CHECKING:
    from emssd.cli.experiment import RowsFile
    from emssd.model.load.loading import ModelCache
    from emssd.model.run.parallel import Group

__all__ = ["Jobs", "SweptRun", "print_sweep"]

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep, with its overrides, ``NAME=VALUE``; a run that failed has the reason as its `error`."""

    options: RunConfig | None
    overrides: Seq[str]
    metrics: dict[str, Any]
    folder: Path
    error: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Of steps without prompts; ``None`` of a run that was resumed with nothing left to do, and kept none."""
        speed: float | None = self.metrics.get("decode_tokens_per_second")
        return speed


class Jobs:
    """Runs one job after the other; models stay loaded, and the rows of an experiment go to one file.

    Attributes:
        found_difference: whether ``check=`` found tokens that are not those of the model alone.
        in_order: whether this process has all runs of a sweep, and so goes on after one that failed.
        folder: of the sweep, where ``failed.jsonl`` tells which runs failed.
    """

    def __init__(self, registry: Registry) -> None:
        self.found_difference = self.in_order = False
        self.folder: Path | None = None
        self._registry = registry
        self._rows: RowsFile | None = None
        self._swept: list[SweptRun] = []
        self._start, self._num_done = time.monotonic(), 0  # of the jobs of an experiment
        self.group: Any = None  # of processes that run the jobs together, once they have joined

    @cached_property
    def _models(self) -> ModelCache:
        from emssd.model.load.loading import ModelCache  # here, because it brings torch, which --help does not need

        return ModelCache()

    @property
    def is_silent(self) -> bool:
        """Whether rank 0 prints and writes for this process."""
        return self.group is not None and self.group.rank > 0

    def attempt(self, overrides: Seq[str], run: Callable[[], _Result]) -> _Result | None:
        """The result of `run`, or ``None``: an error of ours ends one run of a sweep, and the others go on."""
        try:
            return run()
        except EmssdError as error:
            if not self.in_order or isinstance(error, GroupError):  # no run can be without the process that has ended
                raise
            self._swept.append(SweptRun(None, overrides, {}, Path(), str(error)))
            plain_console(stderr=True).print(f"failed: {error}", soft_wrap=True)
            return None

    def run(self, config: RunConfig, config_text: str, output_dir: Path, swept: Seq[str] | None = None) -> None:
        """One run with its own tables; `swept` are the overrides of one in a sweep."""
        group = self._join(config)
        from emssd.cli.job import run_job

        result = run_job(
            config, output_dir, config_text, self._registry, models=self._models, alone=swept is None, group=group
        )
        self.found_difference |= _differs(result.metrics)
        if swept is not None:
            self._swept.append(SweptRun(config, swept, result.metrics, output_dir))

    def run_of_experiment(
        self, config: RunConfig, config_text: str, folder: Path, number: int, overrides: Seq[str], total: int
    ) -> None:
        """Job `number` of the experiment's sweep: a line on the console, and a row."""
        from emssd.cli.experiment import row_of, simulated_row
        from emssd.cli.intake import check_options
        from emssd.cli.job import run_job

        assert config.experiment is not None
        group = self._join(config)
        console = plain_console(stderr=True)
        check_options(config)
        _check_overrides(config, overrides)
        if group.made_by_first(partial(self._has_row, config, folder, number, overrides)):
            return
        if config.experiment.simulated:
            if self._rows is not None:
                self._rows.append(simulated_row(config, number, overrides))
            return
        # Half a run has no figures of its own, and one whose drafter was switched off has those of no drafter.
        afresh = dataclasses.replace(config, resume=False, overwrite=True, on_drafter_error=OnDrafterError.fail)
        run = partial(
            run_job, afresh, folder / str(number), config_text, self._registry, models=self._models, brief=True,
            alone=False, group=group,
        )  # fmt: skip
        if (result := self.attempt(overrides, run)) is None or self._rows is None:
            return
        assert result.engine is not None
        self.found_difference |= _differs(result.metrics)
        row = row_of(config, result.engine, result.metrics, result.generations, number, overrides)
        self._rows.append(row)
        self._num_done += 1
        left = time_left(time.monotonic() - self._start, self._num_done, total - number - 1)
        console.print(f"{number:4d}  {number + 1} of {total}: {_said(row)}, {left}", soft_wrap=True)

    def _has_row(self, config: RunConfig, folder: Path, number: int, overrides: Seq[str]) -> bool:
        """Open the file of rows before the first job. Returns whether it has the row of this one."""
        from emssd.cli.experiment import RowsFile

        if self._rows is None and config.experiment is not None:
            self._rows = RowsFile(folder, resume=config.resume, overwrite=config.overwrite)
            _check_kept(self._rows)
            title = f"experiment={config.experiment.name} size={config.size.value}: {config.experiment.title}"
            plain_console(stderr=True).print(title)
        return self._rows is not None and self._rows.has(number, overrides)

    def _join(self, config: RunConfig) -> Group:
        """The processes that run this job together, of which only rank 0 is heard."""
        from emssd.model.run.parallel import Group, join

        if config.model.tensor_parallel:
            self.group = join()
            if self.is_silent:
                sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until this process ends
        elif "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                f"torchrun started {os.environ['WORLD_SIZE']} processes, and each would decode everything; add "
                f"model.tensor_parallel=true to spread the model over them"
            )
        return self.group or Group()

    def close(self) -> None:
        """Let others write to the folder of the experiment."""
        if self._rows is not None:
            self._rows.close()

    def finish(self) -> ConfigError | None:
        """Print the results of a sweep or an experiment, and how to see more of them. Returns an error: runs failed."""
        console, failed = plain_console(), [run for run in self._swept if run.error]
        if self.folder is not None and self.folder.is_dir():
            self._note(self.folder / "failed.jsonl", failed)
        num_done = len(self._swept) - len(failed) if self._rows is None else len(self._rows.rows)
        if failed and not num_done and len({run.error for run in failed}) == 1:
            return ConfigError(failed[0].error)
        if self._rows is not None:
            self._print_experiment(console, self._rows)
        elif len(self._swept) > 1:
            print_sweep(console, self._swept)
        if not failed:
            return None
        every = num_done + len(failed)
        return ConfigError(
            f"{len(failed)} of {every} runs failed; once their causes are mended, the same command with resume=true "
            f"makes them"
        )

    def _note(self, path: Path, failed: Seq[SweptRun]) -> None:
        """Write the file for `emssd_lab.report`, or remove that of an earlier try."""
        if not failed:
            path.unlink(missing_ok=True)
            return
        with whole_file(path) as file:
            for run in failed:
                file.write(f"{json.dumps({'overrides': [*run.overrides], 'error': run.error})}\n".encode())

    def _print_experiment(self, console: Console, rows: RowsFile) -> None:
        from emssd_lab.report.console import summary

        for part in summary(rows.rows):
            console.print(part)
        _print_checks(console, rows.rows, rows.path.parent)
        for run in self._swept:  # they failed, so they have no rows
            console.print(f"{' '.join(run.overrides)} failed: {run.error}", style="bold red", soft_wrap=True)
        said = f"\nrows: {rows.path}. A page of them: python -m emssd_lab.report {rows.path.parent}"
        console.print(said, soft_wrap=True)


def _check_kept(rows: RowsFile) -> None:
    from emssd_lab.report.rows import parse

    for number, row in enumerate(rows.rows, start=1):
        try:
            parse(row, where=f"{rows.path}:{number}")
        except ConfigError as error:
            raise ConfigError(
                f"resume=true: {error}. With overwrite=true all of its jobs run again; if you take that line out, "
                f"only its own does"
            ) from None


def _check_overrides(config: RunConfig, overrides: Seq[str]) -> None:
    """Refuse what would make the compared cells the same, or a cell something else than it says."""
    names = [override.partition("=")[0].lstrip("+") for override in overrides]
    if "on_drafter_error" in names and config.on_drafter_error is not OnDrafterError.fail:
        raise ConfigError(
            f"on_drafter_error={config.on_drafter_error.value} would leave rows of a drafter that failed and drafted "
            f"nothing; an experiment leaves such a run out, and resume=true makes it again. Leave on_drafter_error= out"
        )
    set_by_method = ("speculate", "budget" if config.method is None else "backend")
    for name in set_by_method if "method" in names else ():
        if name in names:
            raise ConfigError(
                f"experiment={config.experiment and config.experiment.name} compares methods, and a method sets {name} "
                f"itself; leave {name}= out, or choose methods with method=…"
            )


def _print_checks(console: Console, rows: Seq[dict[str, Any]], folder: Path) -> None:
    """Print the results of `check` over all runs."""
    checks = {row["job"]: row["metrics"]["check"] for row in rows if "check" in row.get("metrics", {})}
    if not checks:
        return
    exact, ties, wrong = (sum(check[name] for check in checks.values()) for name in ("exact", "ties", "differences"))
    laws = sum("law" in check for check in checks.values())
    said = f"{exact} exact, {ties} numerical ties, {wrong} true differences" + (
        f", {laws} tests of a law" if laws else ""
    )
    bad = ", ".join(str(job) for job, check in checks.items() if _differs({"check": check}))
    where = f", in jobs {bad}; {folder}/JOB/metrics.json says where" if bad else ""
    console.print(f"\nchecked: {said}{where}", style="bold red" if bad else "bold green", soft_wrap=True)


def _said(row: dict[str, Any]) -> str:
    from emssd.cli.busy import BUSY_SHARE

    drafts = f"{row['drafter_options']}, budget {row['budget']}" if row["speculate"] else "plain greedy"
    what = f"{row['model']}, {row['data_label'] or row['data']}, batch {row['batch_size']}, {row['method'] or drafts}"
    metrics, replay = row["metrics"], " (replay)" if row["replay"] else ""
    others = metrics["other_cpu_share"] or 0.0
    busy = f"; other processes used {others:.0%} of the cores" if others > BUSY_SHARE else ""
    return (
        f"repeat {row['repeat']}, {what}: {metrics['decode_tokens_per_second']:.0f} tokens/s, "
        f"τ {metrics['mean_acceptance_length']:.2f}{replay}, {metrics['seconds']['total']:.1f} s{busy}"
    )


def print_sweep(console: Console, runs: Seq[SweptRun]) -> None:
    """Print the table of `runs`."""
    given = [dict(override.lstrip("+").partition("=")[::2] for override in run.overrides) for run in runs]
    names = [name for name in dict.fromkeys(name for values in given for name in values)
             if len({values.get(name) for values in given}) > 1]  # fmt: skip
    table = Table(title="the runs of this sweep", title_justify="left", title_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    for label in ("tokens/s", "× no drafts", "τ"):
        table.add_column(label, justify="right")
    is_checked = any("check" in run.metrics for run in runs)
    if is_checked:
        table.add_column("check")
    table.add_column("folder", overflow="fold")
    for run, values in zip(runs, given, strict=True):
        figures = [_number(run.tokens_per_second, ".1f"), _speedup(run, runs)]
        figures += [_number(run.metrics.get("mean_acceptance_length"), ".2f")] + [_checked(run)] * is_checked
        end, style = (str(run.folder), "bold red" if _differs(run.metrics) else None)
        if run.error is not None:
            end, style = f"failed: {run.error}", "red"
        table.add_row(*(values.get(name, "") for name in names), *figures, end, style=style)
    console.print(table)
    note = (
        "tokens/s without the time for prompts; × no drafts: by check=, else over the run without drafts that has the "
        "same other options; τ: new tokens of a sequence in a step of the model"
    )
    console.print(note, soft_wrap=True)


def _speedup(run: SweptRun, runs: Seq[SweptRun]) -> str:
    """That of `check`, or over the run without drafts of the same other options."""
    if "speedup" in run.metrics:
        from emssd_lab.report.cells import speedup_text

        return speedup_text(run.metrics)
    same = [other for other in runs if other.options and not other.options.drafts and _others(other) == _others(run)]
    speeds = [other.tokens_per_second for other in same if other.tokens_per_second]
    return f"{run.tokens_per_second / speeds[0]:.2f}×" if run.tokens_per_second is not None and speeds else "–"


def _others(run: SweptRun) -> dict[str, Any] | None:
    """The options of a run without those that say how it drafts, whether it is checked, and where its files go."""
    same = {"drafter": None, "speculate": True, "check": None, "output_dir": ""}
    return None if run.options is None else vars(run.options) | same


def _checked(run: SweptRun) -> str:
    found = run.metrics.get("check")
    if found is None:
        return "–"
    parts = {"exact": found["exact"], "ties": found["ties"], "DIFFERENCES": found["differences"]}
    counts = [f"{count} {name}" for name, count in parts.items() if count or name == "exact"]
    if (law := found.get("law")) is not None:
        tested = f"{'law' if law['right'] else 'ANOTHER LAW'}, p {law['p_value']:.2g}"
        counts = [*counts, tested] if any(parts.values()) else [tested]
    return ", ".join(counts)


def _differs(metrics: Mapping[str, Any]) -> bool:
    """Whether `check` has found that the rows of a run are not those of the model alone."""
    found = metrics.get("check", {})
    return bool(found.get("differences")) or not found.get("law", {}).get("right", True)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"
