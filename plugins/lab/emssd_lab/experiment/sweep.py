"""The table of a sweep's runs on the console."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from rich.console import Console
from rich.table import Table

from emssd.cli.console import speedup_text
from emssd.cli.jobs import SweptRun, differs

__all__ = ["print_sweep"]

_SPEED = "decode_tokens_per_second"


def print_sweep(console: Console, runs: Seq[SweptRun]) -> None:
    """Print the table of `runs`."""
    options = [dict(override.lstrip("+").partition("=")[::2] for override in run.overrides) for run in runs]
    swept = [name for name in dict.fromkeys(name for values in options for name in values)
             if len({values.get(name) for values in options}) > 1]  # fmt: skip
    table = Table(title="the runs of this sweep", title_justify="left", title_style="bold")
    for name in swept:
        table.add_column(name, overflow="fold")
    for label in ("tokens/s", "× no drafts", "τ"):
        table.add_column(label, justify="right")
    is_checked = any("check" in run.metrics for run in runs)
    if is_checked:
        table.add_column("check")
    table.add_column("folder", overflow="fold")
    for run, values in zip(runs, options, strict=True):
        figures = [_number(run.metrics.get(_SPEED), ".1f"), _speedup(run, runs)]
        figures += [_number(run.metrics.get("mean_acceptance_length"), ".2f")] + [_checked(run)] * is_checked
        end, style = (str(run.folder), "bold red" if differs(run.metrics) else None)
        if run.error is not None:
            end, style = f"failed: {run.error}", "red"
        table.add_row(*(values.get(name, "") for name in swept), *figures, end, style=style)
    console.print(table)
    note = (
        "tokens/s without the time for prompts; × no drafts: by check=, else over the run without drafts that has the "
        "same other options; τ: new tokens of a sequence in a step of the model"
    )
    console.print(note, soft_wrap=True)


def _speedup(run: SweptRun, runs: Seq[SweptRun]) -> str:
    """The one of `check`, or over the run without drafts of the same other options."""
    if "speedup" in run.metrics:
        return speedup_text(run.metrics)
    same = [other for other in runs if other.options and not other.options.drafts and _others(other) == _others(run)]
    speeds = [other.metrics[_SPEED] for other in same if other.metrics.get(_SPEED)]
    # A run that was resumed with nothing left to do, and kept no figures, has none.
    return f"{run.metrics[_SPEED] / speeds[0]:.2f}×" if speeds and _SPEED in run.metrics else "–"


def _others(run: SweptRun) -> dict[str, Any] | None:
    """The options of a run without those that say how it drafts, whether it is checked, and where its files go."""
    same = {"drafter": None, "speculate": True, "check": None, "output_dir": ""}
    return None if run.options is None else vars(run.options) | same


def _checked(run: SweptRun) -> str:
    check = run.metrics.get("check")
    if check is None:
        return "–"
    parts = {"exact": check["exact"], "ties": check["ties"], "DIFFERENCES": check["differences"]}
    counts = [f"{count} {name}" for name, count in parts.items() if count or name == "exact"]
    if (law := check.get("law")) is not None:
        tested = f"{'law' if law['right'] else 'ANOTHER LAW'}, p {law['p_value']:.2g}"
        counts = [*counts, tested] if any(parts.values()) else [tested]
    return ", ".join(counts)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"
