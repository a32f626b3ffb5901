"""The runs of one command: a single one, those of a sweep, or those of an experiment, with what they share."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence as Seq
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from emssd.cli.config import RunConfig
from emssd.cli.progress import time_left
from emssd.cli.sweep import SweptRun, differs, print_sweep
from emssd.decoding.options import OnDrafterError
from emssd.errors import ConfigError
from emssd.errors.terminal import plain_console
from emssd.plugins.registry import Registry

if TYPE_CHECKING:
    from emssd.cli.experiment import RowsFile
    from emssd.model.loading import ModelCache

__all__ = ["Jobs"]


class Jobs:
    """Runs one job after the other; models stay loaded, and the rows of an experiment go to one file.

    Attributes:
        found_difference: whether ``check=`` found tokens that are not those of the model alone.
    """

    def __init__(self, registry: Registry) -> None:
        self.found_difference = False
        self._registry = registry
        self._rows: RowsFile | None = None
        self._swept: list[SweptRun] = []
        self._start, self._num_done = time.monotonic(), 0  # of the jobs of an experiment

    @cached_property
    def _models(self) -> ModelCache:
        from emssd.model.loading import ModelCache  # here, because it brings torch, which --help does not need

        return ModelCache()

    def run(self, config: RunConfig, config_text: str, output_dir: Path, swept: Seq[str] | None = None) -> None:
        """One run with its own tables; `swept` are the overrides of one in a sweep."""
        self._follow(config)
        from emssd.cli.job import run_job

        result = run_job(config, output_dir, config_text, self._registry, models=self._models, alone=swept is None)
        self.found_difference |= differs(result.metrics)
        if swept is not None:
            self._swept.append(SweptRun(config, swept, result.metrics, output_dir))

    def run_of_experiment(
        self, config: RunConfig, config_text: str, folder: Path, number: int, overrides: Seq[str], total: int
    ) -> None:
        """Job `number` of the experiment's sweep: a line on the console, and a row."""
        from emssd.cli.experiment import RowsFile, row_of, simulated_row
        from emssd.cli.intake import check_options
        from emssd.cli.job import run_job

        assert config.experiment is not None
        self._follow(config)
        console = plain_console(stderr=True)
        check_options(config)
        _check_overrides(config, overrides)
        if self._rows is None:
            self._rows = RowsFile(folder, resume=config.resume, overwrite=config.overwrite)
            _check_kept(self._rows)
            console.print(f"experiment={config.experiment.name} size={config.size.value}: {config.experiment.title}")
        if self._rows.has(number, overrides):
            return
        if config.experiment.simulated:
            self._rows.append(simulated_row(config, number, overrides))
            return
        # Half a run has no figures of its own, and one whose drafter was switched off has those of no drafter.
        afresh = dataclasses.replace(config, resume=False, overwrite=True, on_drafter_error=OnDrafterError.fail)
        result = run_job(
            afresh, folder / str(number), config_text, self._registry, models=self._models, brief=True, alone=False
        )
        assert result.engine is not None
        self.found_difference |= differs(result.metrics)
        row = row_of(config, result.engine, result.metrics, result.generations, number, overrides)
        self._rows.append(row)
        self._num_done += 1
        left = time_left(time.monotonic() - self._start, self._num_done, total - number - 1)
        console.print(f"{number:4d}  {number + 1} of {total}: {_said(row)}, {left}", soft_wrap=True)

    def _follow(self, config: RunConfig) -> None:
        """With tensor parallel, only process 0 comes back from here."""
        if config.model.tensor_parallel:
            import torch

            from emssd.decoding.parallel import follow_unless_first

            if config.num_threads:
                torch.set_num_threads(config.num_threads)
            follow_unless_first(self._registry)
        elif "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                f"torchrun started {os.environ['WORLD_SIZE']} processes, and each would decode everything; add "
                f"model.tensor_parallel=true to spread the model over them"
            )

    def close(self) -> None:
        """Let others write to the folder of the experiment."""
        if self._rows is not None:
            self._rows.close()

    def finish(self) -> None:
        """Print the results of a sweep or an experiment, and how to see more of them."""
        console = plain_console()
        if len(self._swept) > 1:
            print_sweep(console, self._swept)
        if self._rows is None:
            return
        from emssd.report import summary

        rows = self._rows.rows
        for part in summary(rows):
            console.print(part)
        _print_checks(console, rows, self._rows.path.parent)
        console.print(
            f"\nrows: {self._rows.path}. A page of them: python -m emssd.report {self._rows.path.parent}",
            soft_wrap=True,
        )


def _check_kept(rows: RowsFile) -> None:
    from emssd.report.rows import parse

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
            f"nothing; an experiment ends there, and goes on with resume=true. Leave on_drafter_error= out"
        )
    set_by_method = ("speculate", "budget" if config.method is None else "backend")
    for name in set_by_method if "method" in names else ():
        if name in names:
            raise ConfigError(
                f"experiment={config.experiment and config.experiment.name} compares methods, and a method sets {name} "
                f"itself; leave {name}= out, or choose methods with method=…"
            )


def _print_checks(console: Console, rows: Seq[dict[str, Any]], folder: Path) -> None:
    """Print the results of `check=greedy` over all runs."""
    checks = {row["job"]: row["metrics"]["check"] for row in rows if "check" in row.get("metrics", {})}
    if not checks:
        return
    exact, ties, wrong = (sum(check[name] for check in checks.values()) for name in ("exact", "ties", "differences"))
    jobs = ", ".join(str(job) for job, check in checks.items() if check["differences"])
    where = f", in jobs {jobs}; {folder}/JOB/metrics.json says where" if wrong else ""
    console.print(
        f"\ncheck=greedy: {exact} exact, {ties} numerical ties, {wrong} true differences{where}",
        style="bold red" if wrong else "bold green",
        soft_wrap=True,
    )
    if laws := {job: check["law"] for job, check in checks.items() if "law" in check}:
        others = ", ".join(str(job) for job, law in laws.items() if not law["right"])
        console.print(
            f"of {len(laws)} runs with residual sampling, {f'jobs {others} have ANOTHER LAW' if others else 'all have'}"
            f"{'' if others else ' the law of plain decoding'}",
            style="bold red" if others else "bold green",
            soft_wrap=True,
        )


def _said(row: dict[str, Any]) -> str:
    from emssd.metrics.busy import BUSY_SHARE

    drafts = f"{row['drafter_options']}, budget {row['budget']}" if row["speculate"] else "plain greedy"
    what = f"{row['model']}, {row['data_label'] or row['data']}, batch {row['batch_size']}, {row['method'] or drafts}"
    metrics, replay = row["metrics"], " (replay)" if row["replay"] else ""
    others = metrics["other_cpu_share"] or 0.0
    busy = f"; other processes used {others:.0%} of the cores" if others > BUSY_SHARE else ""
    return (
        f"repeat {row['repeat']}, {what}: {metrics['decode_tokens_per_second']:.0f} tokens/s, "
        f"τ {metrics['mean_acceptance_length']:.2f}{replay}, {metrics['seconds']['total']:.1f} s{busy}"
    )
