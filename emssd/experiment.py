"""The rows of an experiment: one JSON line per run of its sweep, with everything that a report or a reader needs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence as Seq
from enum import Enum
from pathlib import Path
from typing import Any

from emssd.config import RunConfig
from emssd.costs import Costs
from emssd.engine import Engine
from emssd.errors import ConfigError, OutputError
from emssd.generation import Generation
from emssd.provenance import provenance

__all__ = ["RowsFile", "label_of", "row_of", "simulated_row"]

_AROUND = frozenset({"resume", "overwrite", "output_dir", "progress"})


class RowsFile:
    """``rows.jsonl`` in the folder of an experiment.

    Args:
        folder: made if it does not exist.
        resume: keep the rows that are there, and do not run their jobs again.
        overwrite: replace them.

    Raises:
        OutputError: it cannot be written, or holds rows, and neither `resume` nor `overwrite` says what to do.
        ConfigError: with `resume`, rows of another experiment.
    """

    def __init__(self, folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = folder / "rows.jsonl"
        self._there: dict[int, list[str]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            kept = text[: text.rfind("\n") + 1] if resume else ""
            if resume or overwrite or not text:
                self.path.write_text(kept, encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"cannot write {self.path}: {error.strerror}; set output_dir to a writable folder"
            ) from error
        if text and not (resume or overwrite):
            raise OutputError(
                f"output_dir={folder} holds the rows of an earlier experiment; resume=true goes on with it, "
                f"overwrite=true replaces it, or set output_dir to another folder"
            )
        for line in kept.splitlines():
            row = json.loads(line)
            self._there[row["job"]] = row["overrides"]

    def has(self, job: int, overrides: Seq[str]) -> bool:
        """Whether job number `job` of the sweep is done.

        Raises:
            ConfigError: it was another job then.
        """
        if job not in self._there:
            return False
        before, now = _what(self._there[job]), _what(overrides)
        if before != now:
            raise ConfigError(
                f"resume=true: job {job} of {self.path} was {' '.join(before)}, and is now {' '.join(now)}; "
                f"go on with the same command, or start again with overwrite=true"
            )
        return True

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, at once."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror}; the rows before are kept") from error

    def read(self) -> list[dict[str, Any]]:
        """All rows."""
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


def row_of(
    config: RunConfig, engine: Engine, metrics: dict[str, Any], done: Seq[Generation], job: int, overrides: Seq[str]
) -> dict[str, Any]:
    """The row of one run.

    Args:
        config: of the run.
        engine: that ran.
        metrics: of the run.
        done: its generations, in the order of the prompts.
        job: its number in the sweep.
        overrides: what the sweep and the user set, as Hydra has it.
    """
    assert config.experiment is not None
    target, model = engine.target, config.model
    drafters = [each.drafter for each in engine.drafting.drafters]
    replays = [said for drafter in drafters if (said := getattr(drafter, "replays", None))]
    return {
        "experiment": config.experiment.name,
        "size": config.size.value,
        "job": job,
        "repeat": config.repeat,
        "overrides": list(overrides),
        "method": config.method,
        "speculate": config.speculate and config.drafter.name != "none",
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

    from emssd.simulate.appendix import appendix_points

    assert config.experiment is not None
    values = config.experiment.sizes[config.size.value]
    longest = int(values["max_acceptance"])
    points = appendix_points(
        values["p"], values["batch_size"], max_acceptance=longest, num_steps=int(values["num_steps"]), seed=0
    )
    return {
        "experiment": config.experiment.name,
        "size": config.size.value,
        "job": job,
        "repeat": config.repeat,
        "overrides": list(overrides),
        "max_acceptance": longest,
        "num_steps": int(values["num_steps"]),
        "points": [dataclasses.asdict(point) for point in points],
        "provenance": provenance(torch.device("cpu"), torch.float32) | {"seed": {"simulation": 0}},
    }


def label_of(options: Any) -> str:
    """A plugin's name, and its options where they are not the defaults: ``padded(pad_kv=False)``."""
    given = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name != "name" and field.default is not dataclasses.MISSING and value != field.default:
            given.append(f"{field.name}={value.value if isinstance(value, Enum) else value}")
    return f"{options.name}({', '.join(given)})" if given else str(options.name)


def _what(overrides: Seq[str]) -> list[str]:
    """Those that say what runs; the others say where and how it is shown."""
    return [item for item in overrides if item.partition("=")[0] not in _AROUND]


def _task_of(config: RunConfig, overrides: Seq[str]) -> str | None:
    """The name of the task, unless the user chose other data than the task's."""
    chosen = [item.removeprefix("data=") for item in overrides if item.startswith("data=")]
    return config.task.name if config.task is not None and chosen in ([], [config.task.data]) else None


def _seeds(config: RunConfig) -> dict[str, int]:
    """Of everything random in the run; greedy decoding has none of its own."""
    groups = {"drafter": config.drafter, "data": config.data, "budget": config.budget}
    seeds = {name: int(group.seed) for name, group in groups.items() if hasattr(group, "seed")}
    return seeds | ({"weights": 0} if config.model.architecture else {})
