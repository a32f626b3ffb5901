"""The table that ends a sweep: a line for each run, with what differs between them and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from emssd.cli.config import RunConfig

__all__ = ["SweptRun", "differs", "print_sweep"]


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep, with its overrides, ``NAME=VALUE``."""

    options: RunConfig
    overrides: Seq[str]
    metrics: dict[str, Any]
    folder: Path

    @property
    def is_plain(self) -> bool:
        """Whether it decodes without drafts, so that others may be compared with it."""
        return not self.options.speculate or self.options.drafter.name == "none"

    @property
    def tokens_per_second(self) -> float | None:
        """Of steps without prompts; ``None`` of a run that was resumed with nothing left to do, and kept none."""
        speed: float | None = self.metrics.get("decode_tokens_per_second")
        return speed


def print_sweep(console: Console, runs: Seq[SweptRun]) -> None:
    """Print the table of `runs`."""
    given = [dict(override.lstrip("+").partition("=")[::2] for override in run.overrides) for run in runs]
    names = [name for name in dict.fromkeys(name for values in given for name in values)
             if len({values.get(name) for values in given}) > 1]  # fmt: skip
    table = Table(title="the runs of this sweep", title_justify="left", title_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    for label in ("tokens/s", "τ", "speed-up"):
        table.add_column(label, justify="right")
    is_checked = any("check" in run.metrics for run in runs)
    if is_checked:
        table.add_column("check")
    table.add_column("folder", overflow="fold")
    for run, values in zip(runs, given, strict=True):
        checked = [_checked(run)] if is_checked else []
        figures = [_number(run.tokens_per_second, ".1f"), _number(run.metrics.get("mean_acceptance_length"), ".2f")]
        speedup = _speedup(run, runs)
        table.add_row(*(values.get(name, "") for name in names), *figures, _number(speedup, ".2f", "×"), *checked,
                      str(run.folder), style="bold red" if differs(run.metrics) else None)  # fmt: skip
    console.print(table)
    note = "tokens/s of steps without prompts; speed-up over plain greedy decoding with the same other options"
    console.print(note, soft_wrap=True)


def _speedup(run: SweptRun, runs: Seq[SweptRun]) -> float | None:
    """Over the plain run of the same other options; where there is none, over that of `check`."""
    same = [other for other in runs if other.is_plain and _others(other) == _others(run)]
    speeds = [other.tokens_per_second for other in same if other.tokens_per_second]
    if run.tokens_per_second is not None and speeds:
        return run.tokens_per_second / speeds[0]
    speedup: float | None = run.metrics.get("speedup")
    return speedup


def _others(run: SweptRun) -> RunConfig:
    """The options of a run without those that say how it drafts, whether it is checked, and where its files go."""
    return dataclasses.replace(run.options, drafter=None, speculate=True, check=None, output_dir="")


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


def differs(metrics: Mapping[str, Any]) -> bool:
    """Whether `check` has found that the rows of a run are not those of the model alone."""
    found = metrics.get("check", {})
    return bool(found.get("differences")) or not found.get("law", {}).get("right", True)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"
