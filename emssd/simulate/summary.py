"""The figures of a simulated run, as plain values and as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from emssd.simulate.simulator import Simulation

__all__ = ["Summary", "summarize", "summary_table"]

Summary = dict[str, str | int | float]
"""A simulated run: ``label``, what ran, and its figures. Their names and formulas are those of ``docs/metrics.md``."""

_COLUMNS = (  # heading, figure, format
    ("tokens/s", "tokens_per_second", ",.1f"),
    ("tokens/step", "tokens_per_step", ",.2f"),
    ("steps", "num_steps", ",d"),
    ("new tokens", "num_new_tokens", ",d"),
    ("τ̄", "mean_acceptance_length", ".2f"),
    ("drafted", "mean_draft_length", ".2f"),
    ("δ̄/τmax", "padding_ratio", ".1%"),
    ("fill", "batch_fill", ".1%"),
    ("preempted", "num_preempted", ",d"),
    ("seconds", "seconds", ".2f"),
)


def summarize(simulation: Simulation, label: str) -> Summary:
    """The figures of `simulation`; seconds and tokens/s are simulated, and count all steps, prompts included."""
    report = simulation.report
    metrics = report.metrics()
    return {
        "label": label,
        "num_steps": report.num_steps,
        "num_new_tokens": report.num_new_tokens,
        "num_computed_tokens": report.num_tokens,
        "tokens_per_step": report.num_new_tokens / max(report.num_steps, 1),
        "seconds": report.total_seconds,
        "tokens_per_second": report.tokens_per_second,
        "mean_acceptance_length": report.mean_acceptance_length,
        **{name: metrics[name] for name in ("mean_draft_length", "padding_ratio", "batch_fill")},
        "num_preempted": report.num_preempted,
    }


def summary_table(summaries: Iterable[Summary]) -> Table:
    """One line of figures per run."""
    table = Table("run", title="simulated, not measured", title_justify="left", title_style="bold")
    for heading, _, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for run in summaries:
        table.add_row(str(run["label"]), *(format(run[name], form) for _, name, form in _COLUMNS))
    return table
