"""The figures of a simulated run, as values, as JSON and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

from emssd.simulate.simulator import Simulation

__all__ = ["Summary", "summarize", "summary_table"]


@dataclass(frozen=True, slots=True)
class Summary:
    """A simulated run; names and formulas are those of ``docs/metrics.md``, seconds are simulated.

    Attributes:
        label: what ran.
        num_steps, num_new_tokens, num_computed_tokens: totals of the run.
        tokens_per_step: new tokens of all rows ÷ steps.
        seconds, tokens_per_second: of all steps, prompts included.
        mean_acceptance_length: τ̄, the target's own token included.
        mean_draft_length: drafted tokens per row and step.
        padding_ratio: mean of δ̄/τ_max over decode steps.
        batch_fill: rows ÷ batch size, mean over the steps with a queue behind.
        num_preempted: rows that lost their KV.
    """

    label: str
    num_steps: int
    num_new_tokens: int
    num_computed_tokens: int
    tokens_per_step: float
    seconds: float
    tokens_per_second: float
    mean_acceptance_length: float
    mean_draft_length: float
    padding_ratio: float
    batch_fill: float
    num_preempted: int

    def as_dict(self) -> dict[str, str | int | float]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def summarize(simulation: Simulation, label: str) -> Summary:
    """The figures of `simulation`."""
    report = simulation.report
    metrics = report.metrics()
    return Summary(
        label=label,
        num_steps=report.num_steps,
        num_new_tokens=report.num_new_tokens,
        num_computed_tokens=report.num_tokens,
        tokens_per_step=report.num_new_tokens / max(report.num_steps, 1),
        seconds=report.total_seconds,
        tokens_per_second=report.tokens_per_second,
        mean_acceptance_length=report.mean_acceptance_length,
        mean_draft_length=metrics["mean_draft_length"],
        padding_ratio=metrics["padding_ratio"],
        batch_fill=metrics["batch_fill"],
        num_preempted=report.num_preempted,
    )


def summary_table(summaries: Iterable[Summary]) -> Table:
    """One row of figures per run."""
    table = Table(title="simulated, not measured", title_justify="left", title_style="bold")
    table.add_column("run")
    figures = "tokens/s", "tokens/step", "steps", "new tokens", "τ̄", "drafted", "δ̄/τmax", "fill", "preempted", "seconds"
    for name in figures:
        table.add_column(name, justify="right")
    for run in summaries:
        table.add_row(
            run.label,
            f"{run.tokens_per_second:,.1f}",
            f"{run.tokens_per_step:,.2f}",
            f"{run.num_steps:,d}",
            f"{run.num_new_tokens:,d}",
            f"{run.mean_acceptance_length:.2f}",
            f"{run.mean_draft_length:.2f}",
            f"{run.padding_ratio:.1%}",
            f"{run.batch_fill:.1%}",
            f"{run.num_preempted:,d}",
            f"{run.seconds:.2f}",
        )
    return table
