"""Drafters side by side: by kind of text, or, of chains and token trees, by batch size."""

from __future__ import annotations

import pandas as pd

from emssd_lab.report.cells import marks, setting_names, speedup_text, speedups
from emssd_lab.report.figures import coloured, speed_chart
from emssd_lab.report.sections.common import Section
from emssd_lab.report.tables import escape, pivot

__all__ = ["drafters"]


def drafters(section: Section, rows: pd.DataFrame) -> None:
    """Tables of speed-ups and of acceptance, for each model, backend, budget, and batch size or kind of text."""
    by_size = section.name == "trees"
    drafted = rows[rows.speculate].sort_values("batch_size", kind="stable")
    drafted = drafted.assign(
        text=[setting.data for setting in drafted.setting],
        common=[setting._replace(drafter="", length="", data=setting.data if by_size else "")
                for setting in drafted.setting],
    )  # fmt: skip
    names = setting_names(drafted.common)
    groups = drafted.groupby(["common", "line"] if by_size else ["common", "batch_size", "line"], sort=False)
    several = by_size or len({key[1:] for key, _ in groups}) > 1
    for (common, *size, line), group in groups:
        mark = marks(group)
        parts = [f"batch size {number}" for number in size] + [line] * several + [f"({mark})"] * bool(mark)
        title = " · ".join([names[common], *parts])
        section.say(f"### {escape(title)}")
        cells = {
            (key[1], str(key[2])): cell
            for key, cell in group.groupby(["setting", "drafter", "batch_size" if by_size else "text"], sort=False)
        }
        section.table(
            pivot("drafter", {key: speedup_text(cell) for key, cell in cells.items()}),
            "Speed-up, median (least–greatest):",
        )
        section.table(
            pivot("drafter", {key: _accepted(cell) for key, cell in cells.items()}),
            "Mean acceptance length τ, drafted tokens of a row in a step, and the share that was accepted:",
        )
        if by_size:
            lines = {name: speedups(mine) for name, mine in group.groupby("drafter", sort=False)}
            section.draw(f"Speed-up by batch size: {title}", speed_chart(title, coloured(lines), mark))


def _accepted(cell: pd.DataFrame) -> str:
    num_steps = sum(sum(counts.values()) for counts in cell.draft_length_histogram)
    drafted = sum(length * count for counts in cell.draft_length_histogram for length, count in counts.items())
    accepted = sum((tau - 1) * count for counts in cell.acceptance_histogram for tau, count in counts.items())
    share = f"{drafted / num_steps:.1f}, {accepted / drafted:.0%}" if drafted else "nothing drafted"
    return f"{cell.mean_acceptance_length.median():.2f} ({share})"
