"""The callback of the command line that compares the runs of a sweep; those of an experiment it keeps as rows."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from emssd.cli.config import RunConfig
from emssd.cli.jobs import SweepCallback, SweptRun, differs
from emssd.cli.lines_file import whole_file
from emssd.cli.progress import time_left
from emssd.cli.terminal import plain_console
from emssd.decoding.options import OnDrafterError
from emssd.errors import ConfigError
from emssd_lab import check_extra

if TYPE_CHECKING:
    from rich.console import Console

    from emssd_lab.experiment.rows import RowsFile

__all__ = ["Experiment"]


class Experiment(SweepCallback):
    """Prints a table of a sweep. With ``experiment=…`` each run is a row of ``rows.jsonl``, and the tables are its."""

    def __init__(self) -> None:
        self._rows: RowsFile | None = None
        self._runs = list[SweptRun]()  # of an experiment, those that failed
        self._start, self._num_done = time.monotonic(), 0

    def is_done(self, run: SweptRun) -> bool:
        """Whether there is a row of `run`; the file is opened before the first one. A simulation is done here."""
        config = run.options
        assert config is not None
        assert config.experiment is not None
        _check_overrides(config, run)
        if self._rows is None:
            check_extra(f"experiment={config.experiment.name}", "pandas")
            from emssd_lab.experiment.rows import RowsFile

            self._rows = RowsFile(run.folder.parent, resume=config.resume, overwrite=config.overwrite)
            self._rows.check()
            title = f"experiment={config.experiment.name} size={config.size.value}: {config.experiment.title}"
            plain_console(stderr=True).print(title)
        if self._rows.has(run.number, run.overrides):
            return True
        if config.experiment.simulated:
            from emssd_lab.experiment.rows import simulated_row

            self._rows.append(simulated_row(run, config))
        return config.experiment.simulated

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        run: SweptRun | None = job_return.return_value if job_return.status is JobStatus.COMPLETED else None
        if run is None:  # Hydra's own call: it is composed, and has not begun
            return
        if self._rows is None or run.result is None:
            kept = run.result and dataclasses.replace(run.result, generations=(), engine=None)
            self._runs.append(dataclasses.replace(run, result=kept))
            return
        from emssd_lab.experiment.rows import row_of, row_text

        row = row_of(run)
        self._rows.append(row)
        self._num_done += 1
        left = time_left(time.monotonic() - self._start, self._num_done, run.total - run.number - 1)
        line = f"{run.number:4d}  {run.number + 1} of {run.total}: {row_text(row)}, {left}"
        plain_console(stderr=True).print(line, soft_wrap=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if self._rows is None and not self._runs:  # a run alone
            return
        failed = [run for run in self._runs if run.error]
        rows = None if self._rows is None else self._rows.rows
        folder = self._rows.path.parent if self._rows is not None else self._runs[0].folder.parent
        if folder.is_dir():
            path = folder / "failed.jsonl"  # for the report
            path.unlink(missing_ok=True)
            lines = [json.dumps({"overrides": [*run.overrides], "error": run.error}) + "\n" for run in failed]
            if failed:
                with whole_file(path) as file:
                    file.write("".join(lines).encode())
        num_done = len(self._runs) - len(failed) if rows is None else len(rows)
        if not num_done and len({run.error for run in failed}) == 1:
            return  # the command ends with that error
        if rows is not None:
            self._print_rows(plain_console(), rows, folder)
        elif len(self._runs) > 1:
            from emssd_lab.experiment.sweep import print_sweep

            print_sweep(plain_console(), self._runs)

    def _print_rows(self, console: Console, rows: Seq[dict[str, Any]], folder: Path) -> None:
        from emssd_lab.report.summary import summary

        for part in summary(rows):
            console.print(part)
        checks = {row["job"]: row["metrics"]["check"] for row in rows if "check" in row.get("metrics", {})}
        if checks:
            exact, ties, wrong = (sum(c[name] for c in checks.values()) for name in ("exact", "ties", "differences"))
            laws = sum("law" in check for check in checks.values())
            bad = ", ".join(str(job) for job, check in checks.items() if differs({"check": check}))
            console.print(
                f"\nchecked: {exact} exact, {ties} numerical ties, {wrong} true differences"
                + (f", {laws} tests of a law" if laws else "")
                + (f", in jobs {bad}; {folder}/JOB/metrics.json says where" if bad else ""),
                style="bold red" if bad else "bold green",
                soft_wrap=True,
            )
        for run in self._runs:
            console.print(f"{' '.join(run.overrides)} failed: {run.error}", style="bold red", soft_wrap=True)
        console.print(
            f"\nrows: {folder}/rows.jsonl. A page of them: python -m emssd_lab.report {folder}", soft_wrap=True
        )

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()


def _check_overrides(config: RunConfig, run: SweptRun) -> None:
    """Refuse what would make the compared cells the same, or a cell something else than it says."""
    names = [override.partition("=")[0].lstrip("+") for override in run.overrides]
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
