"""What is compared with what: settings, and the lines of a setting."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from emssd.report.rows import Row

__all__ = ["WITHOUT_BASELINE", "Line", "Setting", "baseline_method", "label_of", "setting_names", "type_name"]

WITHOUT_BASELINE = ("padding_ratio", "acceptance", "step_time")
"""Experiments that count, or time single steps, and so run no plain greedy decoding."""

_BASELINES = dict.fromkeys(("vanilla", "unpad_kv", "unpad_inputs", "unpad_both"), "greedy")
_ORDER = (
    "greedy", "vanilla", "unpad_kv", "unpad_inputs", "unpad_both", "ragged_greedy", "ragged", "flashinfer_greedy",
    "flashinfer",
)  # fmt: skip
_LABELS = {
    "greedy": "greedy",
    "vanilla": "vanilla",
    "unpad_kv": "unpad KV",
    "unpad_inputs": "unpad inputs",
    "unpad_both": "EMS-SD (both unpadded)",
    "ragged_greedy": "greedy on ragged",
    "flashinfer_greedy": "greedy on flashinfer",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What all rows of a comparison have in common.

    Attributes:
        prompts: how many, and how many tokens in all; those of another template or limit have other numbers.
        options: whatever else was set, as in a row.
    """

    size: str
    model: str
    drafter: str
    data: str
    dtype: str
    compiled: bool
    max_new_tokens: int
    batching: str
    machine: str
    prompts: tuple[int, int]
    options: tuple[str, ...]

    @classmethod
    def of(cls, row: Row) -> Setting:
        """The setting that `row` belongs to."""
        lengths = row.samples["num_prompt_tokens"]
        return cls(
            row.size, row.model, row.drafter_options, row.data_label or row.data, row.dtype, row.compiled,
            row.max_new_tokens, row.batching, row.machine, (len(lengths), int(sum(lengths))), row.options,
        )  # fmt: skip


def setting_names(settings: Seq[Setting], name: Callable[[Setting], str] | None = None) -> dict[Setting, str]:
    """By setting what `name` says of it, and where that is the same, whatever else differs.

    Args:
        settings: to be told apart.
        name: ``None`` says model, drafter, data, new tokens and type.
    """
    short = {each: (name or _short_name)(each) for each in settings}
    found = {}
    for each, said in short.items():
        alike = [other for other, theirs in short.items() if theirs == said]
        values = {field: getattr(each, field) for field in _REST if len({getattr(other, field) for other in alike}) > 1}
        common = set.intersection(*(set(other.options) for other in alike))
        options = [option for option in each.options if option not in common]
        found[each] = " · ".join([said, *(_REST[field].format(value) for field, value in values.items()), *options])
    return found


_REST = {
    "drafter": "{}",
    "data": "{}",
    "size": "size {}",
    "max_new_tokens": "{} new tokens",
    "batching": "{} batches",
    "machine": "{}",
    "prompts": "{0[1]} tokens of prompts",
}


def _short_name(each: Setting) -> str:
    data = f"{each.data}, {each.prompts[0]} prompts, {each.max_new_tokens} new tokens"
    return " · ".join([each.model, each.drafter, data, type_name(each)])


def type_name(each: Setting) -> str:
    """The type of the weights, and whether the model is compiled."""
    return each.dtype + (", compiled" if each.compiled else "")


@dataclass(frozen=True, slots=True)
class Line:
    """One of the things that a comparison compares at every batch size.

    Attributes:
        method: ``None`` where the experiment names no methods.
        budget: ``""`` for plain greedy decoding, which has none.
    """

    method: str | None
    speculate: bool
    backend: str
    budget: str

    @classmethod
    def of(cls, row: Row) -> Line:
        """The line that `row` belongs to."""
        return cls(row.method, row.speculate, row.backend_options, row.budget_options if row.speculate else "")

    @property
    def label(self) -> str:
        """What tables and legends call it."""
        if self.method is not None:
            return label_of(self.method)
        return f"{self.budget} on {self.backend}" if self.speculate else f"greedy on {self.backend}"

    @property
    def rank(self) -> tuple[int, str, bool, str]:
        """Sorts lines as the paper lists them."""
        known = _ORDER.index(self.method) if self.method in _ORDER else len(_ORDER)
        return (known, self.backend, self.speculate, self.budget or self.method or "")


def label_of(method: str) -> str:
    """What tables and legends call a method."""
    return _LABELS.get(method, method)


def baseline_method(method: str | None) -> str | None:
    """The method whose rows are the baseline of `method`; ``None`` where the experiment names no methods."""
    return None if method is None else _BASELINES.get(method, f"{method}_greedy")
