"""The rows of an experiment: one JSON line per run of its sweep, with everything that a report or a reader needs.

Each is flushed at once, so that a crash loses nothing.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence as Seq
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from emssd_lab.costs import Costs

from emssd.cli.config import RunConfig, no_size
from emssd.cli.lines_file import LinesFile
from emssd.cli.provenance import provenance
from emssd.decoding.engine import Engine
from emssd.errors import ConfigError
from emssd.sequences import Generation

__all__ = ["RowsFile", "changed", "label_of", "row_of", "setting_of", "simulated_row"]

_AROUND = frozenset({"resume", "overwrite", "output_dir", "progress", "figures", "details"})
"""Options that say where a run goes and how it is shown, not what it is."""
_TOLD = _AROUND | {  # options that other fields of a row tell: data.limit its prompts, threads and device its machine
    "experiment", "size", "method", "task", "repeat", "drafter", "backend", "budget", "model", "data", "sampling",
    "speculate", "batch_size", "batching", "max_new_tokens", "num_threads", "model.dtype", "model.device",
    "model.compile", "data.name", "data.limit",
    "check", "on_error", "on_drafter_error",  # without effect on what a run measures
}  # fmt: skip


class _Job(msgspec.Struct):
    job: int
    overrides: list[str]

    def name(self) -> str:
        return f"the job {self.job}"


class RowsFile:
    """``rows.jsonl`` in the folder of an experiment, with all `rows` that are kept; see `LinesFile.earlier`."""

    def __init__(self, folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
        self._file = LinesFile(folder / "rows.jsonl")
        self.path, self.close = self._file.path, self._file.close
        earlier = self._file.earlier("experiment", _Job, _Job.name, resume=resume, overwrite=overwrite)
        self.rows: list[dict[str, Any]] = [row for row, _ in earlier]

    def has(self, job: int, overrides: Seq[str]) -> bool:
        """Whether job number `job` of the sweep is done; it may have been another job then, which is an error."""
        there = next((row for row in self.rows if row["job"] == job), None)
        if there is None:
            return False
        before, now = _what(there["overrides"]), _what(overrides)
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


def _what(overrides: Seq[str]) -> list[str]:
    """The overrides that determine the run; the others say where it goes and how it is shown."""
    return [item for item in overrides if item.partition("=")[0] not in _AROUND]


def row_of(
    config: RunConfig, engine: Engine, metrics: dict[str, Any], done: Seq[Generation], job: int, overrides: Seq[str]
) -> dict[str, Any]:
    """The row of run number `job` of the sweep, which gave the rows `done`."""
    target, model = engine.target, config.model
    replays = [said for each in engine.drafting.drafters if (said := each.drafter.replays)]
    return _job(config, job, overrides) | {
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
        "data_label": _task_of(config, overrides),
        "dtype": str(target.dtype).removeprefix("torch."),
        "compiled": target.compiled is not None,
        "max_new_tokens": config.max_new_tokens,
        "batching": config.batching.value,
        "options": _other_options(config, overrides),
        "metrics": metrics,
        "samples": {
            "acceptance_length": [round(row.acceptance_length, 4) for row in done],
            "num_prompt_tokens": [len(row.prompt_ids) for row in done],
            "num_new_tokens": [len(row.token_ids) for row in done],
        },
        "costs": dataclasses.asdict(Costs.of(target)),
        "provenance": provenance(target.device, target.dtype) | {"seed": _seeds(config)},
    }


def simulated_row(config: RunConfig, job: int, overrides: Seq[str]) -> dict[str, Any]:
    """The row of the paper's numerical simulation (Appendix B), which runs here."""
    import torch
    from emssd_lab.simulate.appendix import appendix_points

    assert config.experiment is not None
    values = config.experiment.sizes.get(config.size.value)
    if values is None:
        raise ConfigError(no_size(config.size.value))
    longest = int(values["max_acceptance"])
    points = appendix_points(
        values["p"], values["batch_size"], max_acceptance=longest, num_steps=int(values["num_steps"]), seed=0
    )
    return _job(config, job, overrides) | {
        "max_acceptance": longest,
        "num_steps": int(values["num_steps"]),
        "points": points,
        "provenance": provenance(torch.device("cpu"), torch.float32) | {"seed": {"simulation": 0}},
    }


def _job(config: RunConfig, job: int, overrides: Seq[str]) -> dict[str, Any]:
    assert config.experiment is not None
    return {
        "experiment": config.experiment.name,
        "size": config.size.value,
        "job": job,
        "repeat": config.repeat,
        "overrides": list(overrides),
    }


def label_of(options: Any) -> str:
    """A plugin's name, and its options where they are not the defaults: ``padded(pad_kv=False)``."""
    given = [f"{name}={value}" for name, value in changed(options).items() if name != "name"]
    return f"{options.name}({', '.join(given)})" if given else str(options.name)


def changed(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not the defaults; those without a default are among them."""
    found = {}
    for field in dataclasses.fields(options):
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        value = getattr(options, field.name)
        if value != default:
            found[field.name] = value.value if isinstance(value, Enum) else value
    return found


def setting_of(config: RunConfig) -> dict[str, Any]:
    """By which runs of the command line are compared: drafter, budget and batch size, and all that must be equal."""
    apart = {
        "drafter", "backend", "model", "data", "sampling", "budget", "speculate", "batch_size", "check", "data.name"
    }  # fmt: skip
    equal = {name: value for name, value in _given(config).items() if name not in _AROUND | apart}
    equal |= {"backend": label_of(config.backend), "data": config.data.name}
    return {
        "drafter": label_of(config.drafter) if config.speculate else "none",
        "budget": label_of(config.budget),
        "batch_size": config.batch_size,
        "options": sorted(f"{name}={value}" for name, value in equal.items()),
    }


def _given(config: RunConfig) -> dict[str, Any]:
    """By name the options of the run, its model, its data and its sampling that are not the defaults."""
    groups = {"": config, "model.": config.model, "data.": config.data, "sampling.": config.sampling}
    return {f"{group}{name}": value for group, part in groups.items() for name, value in changed(part).items()}


def _other_options(config: RunConfig, overrides: Seq[str]) -> list[str]:
    """Options that are not the defaults and have no field of their own, as ``NAME=VALUE``.

    A method has no label but its name, so what the user sets of its backend and budget is among them.
    """
    said = [f"{name}={value}" for name, value in _given(config).items() if name not in _TOLD]
    if config.method is not None:
        given = [item.lstrip("+") for item in overrides]
        said += [item for item in given if re.match(r"(backend|budget)\b", item)]
    return sorted(said)


def _task_of(config: RunConfig, overrides: Seq[str]) -> str | None:
    """The name of the task, unless the user chose other data than the task's."""
    chosen = [item.removeprefix("data=") for item in overrides if item.startswith("data=")]
    return config.task.name if config.task is not None and chosen in ([], [config.task.data]) else None


def _seeds(config: RunConfig) -> dict[str, int]:
    """Of everything random in the run; greedy decoding has none of its own."""
    groups = {"drafter": config.drafter, "data": config.data, "budget": config.budget}
    found = {name: getattr(group, "seed", None) for name, group in groups.items()}  # as `Spec.config` says
    seeds = {name: seed for name, seed in found.items() if isinstance(seed, int)}
    seeds |= {"sampling": config.sampling.seed} if config.sampling.temperature else {}
    return seeds | ({"weights": 0} if config.model.architecture else {})
