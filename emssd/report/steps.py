"""Rows of ``step_time`` by what may be compared: setting and line, and in them batch size and tokens per sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from emssd.report.cells import Spread
from emssd.report.lines import Line, Setting, setting_names, type_name
from emssd.report.rows import Row, tokens_per_sample

__all__ = ["Steps", "milliseconds", "steps_of"]


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one setting on one backend.

    Attributes:
        name: of the setting, and of the budget where there are several.
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
        replay = any(row.replay for row in self.rows)
        return ", ".join(["random weights"] * self.random_weights + ["replay"] * replay)

    @property
    def longest_acceptance(self) -> float:
        """The largest mean acceptance length of a row; 1 if drafts are wrong throughout."""
        return max(float(row.metrics["mean_acceptance_length"]) for row in self.rows)

    @property
    def title(self) -> str:
        """Setting and backend, with what has to be said of them."""
        name = f"{self.name} · {self.rows[0].backend_options}"
        return f"{name} ({self.mark})" if self.mark else name

    @property
    def cells(self) -> Mapping[int, Mapping[int, list[Row]]]:
        """The repeats by batch size and tokens per sample, from the least."""
        found: dict[int, dict[int, list[Row]]] = {}
        for row in sorted(self.rows, key=lambda row: (row.batch_size, tokens_per_sample(row))):
            found.setdefault(row.batch_size, {}).setdefault(tokens_per_sample(row), []).append(row)
        return found


def steps_of(rows: Iterable[Row]) -> list[Steps]:
    """Each setting once, whatever is drafted at a time; prompts as many as rows of the batch are no part of it."""
    timed = [row for row in rows if row.metrics["decode_row_steps"]]
    alike: dict[tuple[Setting, Line], list[Row]] = {}
    for row in timed:
        setting = dataclasses.replace(Setting.of(row), drafter=_undrafted(row.drafter_options), prompts=(0, 0))
        alike.setdefault((setting, Line.of(row)), []).append(row)
    found: dict[tuple[Setting, Line], list[Row]] = {}
    for (setting, line), mine in alike.items():
        follows = all(len(row.samples["num_prompt_tokens"]) == row.batch_size for row in mine)
        for row in mine:
            prompts = setting.prompts if follows else Setting.of(row).prompts
            found.setdefault((dataclasses.replace(setting, prompts=prompts), line), []).append(row)
    names = setting_names([setting for setting, _ in found], lambda each: f"{each.model} · {type_name(each)}")
    several = len({line.budget for _, line in found}) > 1
    return [
        Steps(names[setting] + (f" · budget {line.budget}" if several else ""), mine)
        for (setting, line), mine in found.items()
    ]


def _undrafted(label: str) -> str:
    """A drafter's name and options without the number of tokens that it drafts, by which steps are compared."""
    name, _, options = label.removesuffix(")").partition("(")
    kept = [option for option in options.split(", ") if option and not option.startswith("num_speculative_tokens=")]
    return f"{name}({', '.join(kept)})" if kept else name


def milliseconds(rows: Iterable[Row]) -> Spread:
    """Of the median step of each repeat."""
    return Spread.of(1e3 * row.metrics["median_decode_step_seconds"] for row in rows)
