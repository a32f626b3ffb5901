"""Rows of ``step_time`` by what may be compared: setting and backend, and in them batch size and tokens per sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from emssd.report.cells import Spread
from emssd.report.lines import Setting, setting_names, type_name
from emssd.report.rows import Row, tokens_per_sample

__all__ = ["Steps", "milliseconds", "steps_of"]


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one setting on one backend.

    Attributes:
        name: of the setting.
        rows: those with decode steps.
    """

    name: str
    rows: Seq[Row]

    @property
    def random_weights(self) -> bool:
        """Whether a model is made up."""
        return any(row.random_weights for row in self.rows)

    @property
    def mark(self) -> str:
        """What every title, legend and caption has to say."""
        return "random weights, replay" if self.random_weights else "replay"

    @property
    def title(self) -> str:
        """Setting and backend, with what has to be said of them."""
        return f"{self.name} · {self.rows[0].backend_options} ({self.mark})"

    @property
    def cells(self) -> Mapping[int, Mapping[int, list[Row]]]:
        """The repeats by batch size and tokens per sample, from the least."""
        found: dict[int, dict[int, list[Row]]] = {}
        for row in sorted(self.rows, key=lambda row: (row.batch_size, tokens_per_sample(row))):
            found.setdefault(row.batch_size, {}).setdefault(tokens_per_sample(row), []).append(row)
        return found


def steps_of(rows: Iterable[Row]) -> list[Steps]:
    """Each setting once; prompts are as many as the batch has rows, and a drafter only makes the drafts that long."""
    found: dict[tuple[Setting, str], list[Row]] = {}
    for row in rows:
        if row.metrics["decode_row_steps"]:
            setting = dataclasses.replace(Setting.of(row), drafter=row.drafter, prompts=(0, 0))
            found.setdefault((setting, row.backend_options), []).append(row)
    names = setting_names([setting for setting, _ in found], lambda each: f"{each.model} · {type_name(each)}")
    return [Steps(names[setting], mine) for (setting, _), mine in found.items()]


def milliseconds(rows: Iterable[Row]) -> Spread:
    """Of the median step of each repeat."""
    return Spread.of(1e3 * row.metrics["median_decode_step_seconds"] for row in rows)
