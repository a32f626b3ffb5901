"""``rows.jsonl``: a line for each run of an experiment, with everything that a report or a reader needs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import msgspec
import torch

from emssd.cli.busy import BUSY_SHARE
from emssd.cli.config import RunConfig, no_size
from emssd.cli.jobs import SweptRun
from emssd.cli.lines_file import LinesFile
from emssd.cli.provenance import AROUND, changed_of_run, label_of
from emssd.errors import ConfigError
from emssd_lab.costs import Costs
from emssd_lab.experiment.appendix import appendix_points
from emssd_lab.provenance import provenance
from emssd_lab.report.rows import parse

__all__ = ["RowsFile", "row_of", "row_text", "simulated_row"]

_IN_OTHER_FIELDS = AROUND | {  # data.limit is in the number of prompts, threads and device in the machine
    "experiment", "size", "method", "task", "repeat", "drafter", "backend", "budget", "model", "data", "sampling",
    "speculate", "batch_size", "batching", "max_new_tokens", "num_threads", "model.dtype", "model.device",
    "model.compile", "data.name", "data.limit",
    "check", "on_error", "on_drafter_error",  # without effect on what a run measures
}  # fmt: skip


class _Job(msgspec.Struct):
    job: int
    overrides: list[str]


class RowsFile:
    """The file in the folder of an experiment, with all `rows` that are kept; see `LinesFile.earlier`.

    Each row is flushed at once, so that a crash loses nothing.
    """

    def __init__(self, folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
        self._file = LinesFile(folder / "rows.jsonl")
        self.path, self.close = self._file.path, self._file.close
        earlier = self._file.earlier(
            "experiment", _Job, lambda row: f"the job {row.job}", resume=resume, overwrite=overwrite
        )
        self.rows: list[dict[str, Any]] = [row for row, _ in earlier]

    def check(self) -> None:
        """Raises ConfigError: a row that is kept is of another format."""
        for number, row in enumerate(self.rows, start=1):
            try:
                parse(row, where=f"{self.path}:{number}")
            except ConfigError as error:
                raise ConfigError(
                    f"resume=true: {error}. With overwrite=true all of its jobs run again; if you take that line out, "
                    f"only its own does"
                ) from None

    def has(self, job: int, overrides: Seq[str]) -> bool:
        """Whether job number `job` of the sweep is done; it may have been another job then, which is an error."""
        row = next((row for row in self.rows if row["job"] == job), None)
        if row is None:
            return False
        before, now = (  # what determines the run
            [item for item in items if item.partition("=")[0] not in AROUND] for items in (row["overrides"], overrides)
        )
        if before != now:
            raise ConfigError(
                f"resume=true: job {job} of {self.path} was {' '.join(before)}, and is now {' '.join(now)}; "
                f"go on with the same command, or start again with overwrite=true"
            )
        return True

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, at once, to the disk itself: a run is worth more than the milliseconds that takes."""
        line = json.dumps(row)  # in ASCII, for readers that split at U+2028 as well
        self._file.append(f"{line}\n".encode())
        self.rows.append(json.loads(line))


def row_of(run: SweptRun) -> dict[str, Any]:
    """The row of a run that has ended."""
    config, result = run.options, run.result
    assert config is not None
    assert result is not None
    assert result.engine is not None
    target, model, rows = result.engine.target, config.model, result.generations
    replays = [text for stage in result.engine.drafting.drafters if (text := stage.drafter.replays)]
    chosen = [item.removeprefix("data=") for item in run.overrides if item.startswith("data=")]
    keeps_task = config.task is not None and chosen in ([], [config.task.data])
    options = [f"{name}={value}" for name, value in changed_of_run(config).items() if name not in _IN_OTHER_FIELDS]
    if config.method is not None:  # its name says nothing of a backend or budget that the user has set
        names = [item.lstrip("+") for item in run.overrides]
        options += [item for item in names if re.match(r"(backend|budget)\b", item)]
    seeds = {name: getattr(getattr(config, name), "seed", None) for name in ("drafter", "data", "budget")}
    seeds |= {"sampling": config.sampling.seed if config.sampling.temperature else None}
    seeds |= {"weights": 0 if model.architecture else None}
    origin = provenance(target.device, target.dtype)
    return _job(run, config) | {
        "method": config.method,
        "speculate": config.drafts,
        "batch_size": config.batch_size,
        "model": Path(model.path).name,
        "random_weights": bool(model.architecture),
        "replay": "; ".join(replays) or None,
        "drafter": config.drafter.name,
        "drafter_options": label_of(config.drafter),
        "backend": config.backend.name,
        "backend_options": label_of(config.backend),
        "budget": config.budget.name,
        "budget_options": label_of(config.budget),
        "data": config.data.name,
        "data_label": config.task.name if keeps_task and config.task else None,
        "dtype": str(target.dtype).removeprefix("torch."),
        "compiled": target.compiled is not None,
        "max_new_tokens": config.max_new_tokens,
        "batching": config.batching.value,
        "options": sorted(options),
        "metrics": result.metrics,
        "samples": {
            "acceptance_length": [round(row.acceptance_length, 4) for row in rows],
            "num_prompt_tokens": [len(row.prompt_ids) for row in rows],
            "num_new_tokens": [len(row.token_ids) for row in rows],
        },
        "costs": dataclasses.asdict(Costs.of(target)),
        "provenance": origin | {"seed": {name: seed for name, seed in seeds.items() if isinstance(seed, int)}},
    }


def simulated_row(run: SweptRun, config: RunConfig) -> dict[str, Any]:
    """The row of the paper's numerical simulation (Appendix B), which runs here."""
    assert config.experiment is not None
    size = config.experiment.sizes.get(config.size.value)
    if size is None:
        raise ConfigError(no_size(config.size.value))
    longest, num_steps = int(size["max_acceptance"]), int(size["num_steps"])
    points = appendix_points(size["p"], size["batch_size"], max_acceptance=longest, num_steps=num_steps, seed=0)
    origin = provenance(torch.device("cpu"), torch.float32) | {"seed": {"simulation": 0}}
    return _job(run, config) | {
        "max_acceptance": longest, "num_steps": num_steps, "points": points, "provenance": origin,
    }  # fmt: skip


def _job(run: SweptRun, config: RunConfig) -> dict[str, Any]:
    assert config.experiment is not None
    return {
        "experiment": config.experiment.name,
        "size": config.size.value,
        "job": run.number,
        "repeat": config.repeat,
        "overrides": list(run.overrides),
    }


def row_text(row: dict[str, Any]) -> str:
    """A row in a line of the console."""
    drafts = f"{row['drafter_options']}, budget {row['budget']}" if row["speculate"] else "plain greedy"
    cell = f"{row['model']}, {row['data_label'] or row['data']}, batch {row['batch_size']}, {row['method'] or drafts}"
    metrics, replay = row["metrics"], " (replay)" if row["replay"] else ""
    others = metrics["other_cpu_share"] or 0.0
    busy = f"; other processes used {others:.0%} of the cores" if others > BUSY_SHARE else ""
    return (
        f"repeat {row['repeat']}, {cell}: {metrics['decode_tokens_per_second']:.0f} tokens/s, "
        f"τ {metrics['mean_acceptance_length']:.2f}{replay}, {metrics['seconds']['total']:.1f} s{busy}"
    )
