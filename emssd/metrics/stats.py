"""Figures of a run, and of its steps; every metric here is defined in ``docs/metrics.md``."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from emssd.attention import KVUsage

__all__ = ["PHASES", "RunReport", "StageStats", "StepStats"]

_NUM_TIMED_STEPS = 1 << 16
_SUMMED = ("num_tokens", "num_kv_tokens", "num_new_tokens", "input_padding", "kv_padding", "num_preempted",
           "num_adopted_tokens")  # fmt: skip
_FIGURES = ("decode_tokens_per_second", "tokens_per_second", "mean_acceptance_length", "batch_fill", "num_preempted",
            "num_adopted_tokens", "num_steps", "num_row_steps", "num_new_tokens")  # fmt: skip
_HISTOGRAMS = ("acceptance_histogram", "draft_length_histogram", "draft_depth_histogram", "drafted_by_depth",
               "accepted_by_depth", "drafted_by_confidence", "accepted_by_confidence")  # fmt: skip

PHASES = ("schedule", "draft", "plan", "forward", "mask", "verify", "other")


class StageStats(NamedTuple):
    """The figures of one drafter in a step.

    Attributes:
        budget, drafted: ``[B]`` what each row was allowed to draft; tokens of it that were verified.
        seconds: inside the drafter's `propose`.
    """

    budget: tuple[int, ...]
    drafted: tuple[int, ...]
    seconds: float


class StepStats(NamedTuple):
    """One step of the engine.

    Attributes:
        is_prefill: whether any row computed more of its prompt than the newest token.
        num_rows, num_waiting: rows of the step, with those that compute a piece of a prompt; rows that wait.
        num_tokens: ``nnz``, tokens computed without padding.
        num_kv_tokens: tokens of KV that the rows have after the step, rejected ones included.
        num_new_tokens: tokens added to sequences, after the cut at EOS and limits.
        drafted, acceptance: ``[B]`` tokens drafted, and acceptance length τ (accepted + 1), of each row.
        input_padding, kv_padding: padding tokens among the inputs; KV slots lost to padding.
        num_preempted: rows that lost their KV in this step.
        num_adopted_tokens: tokens of prompts that this step need not compute, as others had left their KV.
        seconds: of each phase in `PHASES`; empty until the step is timed.
        stages: of each drafter that was asked.
        depths: ``[B]`` depth of each row's token tree; of a chain, its length.
        drafted_by_depth: nodes of all rows that are 1 deep, 2 deep, and so on.
        confidence: of each node that was drafted with one and whose parent was accepted: it, and whether the node was.
    """

    is_prefill: bool
    num_rows: int
    num_waiting: int
    num_tokens: int
    num_kv_tokens: int
    num_new_tokens: int
    drafted: tuple[int, ...]
    acceptance: tuple[int, ...]
    input_padding: int
    kv_padding: int
    num_preempted: int
    num_adopted_tokens: int = 0
    seconds: Mapping[str, float] = MappingProxyType({})
    stages: tuple[StageStats, ...] = ()
    depths: tuple[int, ...] = ()
    drafted_by_depth: tuple[int, ...] = ()
    confidence: tuple[tuple[float, bool], ...] = ()


@dataclass(slots=True)
class _StepSums:
    """Sums over steps of the figures of `StepStats` that have the same names."""

    num_steps: int = 0
    num_row_steps: int = 0
    num_tokens: int = 0
    num_kv_tokens: int = 0
    num_new_tokens: int = 0
    input_padding: int = 0
    kv_padding: int = 0
    num_preempted: int = 0
    num_adopted_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def _sum(self, step: StepStats) -> None:
        self.num_steps += 1
        self.num_row_steps += len(step.acceptance)
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(step, name))
        for phase, seconds in step.seconds.items():
            self.seconds[phase] += seconds

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass(slots=True)
class RunReport(_StepSums):
    """Sums over the steps of a run.

    Attributes:
        decode: the sums over those steps that compute no prompts.
        decode_step_seconds: of the latest decode steps, for their median.
        padding_ratio_sum: over decode steps, of the share of the longest row that the others fall short of it.
        queued_steps, queued_fill_sum: steps in which rows waited; and of these, rows that ran ÷ rows of the batch.
        drafted_by_confidence, accepted_by_confidence: nodes by tenths of their confidence.
    """

    decode: _StepSums = field(default_factory=_StepSums)
    decode_step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMED_STEPS))
    num_allotted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    padding_ratio_sum: float = 0.0
    queued_steps: int = 0
    queued_fill_sum: float = 0.0
    acceptance_histogram: Counter[int] = field(default_factory=Counter)
    draft_length_histogram: Counter[int] = field(default_factory=Counter)
    draft_depth_histogram: Counter[int] = field(default_factory=Counter)
    drafted_by_depth: Counter[int] = field(default_factory=Counter)
    drafted_by_confidence: Counter[float] = field(default_factory=Counter)
    accepted_by_confidence: Counter[float] = field(default_factory=Counter)
    kv_usage: KVUsage = field(default_factory=KVUsage)

    def add(self, step: StepStats, batch_size: int) -> None:
        """Count one step of an engine that runs up to `batch_size` rows."""
        self._sum(step)
        self.num_allotted += sum([sum(stage.budget) for stage in step.stages])
        self.num_drafted += sum(step.drafted)
        self.num_accepted += sum(step.acceptance) - len(step.acceptance)
        if step.num_waiting:
            self.queued_steps += 1
            self.queued_fill_sum += step.num_rows / batch_size
        self.acceptance_histogram.update(step.acceptance)
        self.draft_length_histogram.update(step.drafted)
        self.draft_depth_histogram.update(step.depths)
        self.drafted_by_depth.update(dict(enumerate(step.drafted_by_depth, start=1)))
        for confidence, is_accepted in step.confidence:
            tenth = min(int(10 * confidence), 9) / 10
            self.drafted_by_confidence[tenth] += 1
            self.accepted_by_confidence[tenth] += is_accepted
        if not step.is_prefill:
            longest = max(step.acceptance)
            self.decode._sum(step)
            self.decode_step_seconds.append(sum(step.seconds.values()))
            self.padding_ratio_sum += (longest - sum(step.acceptance) / len(step.acceptance)) / longest

    @property
    def accepted_by_depth(self) -> dict[int, int]:
        """Accepted nodes by their depth: row-steps that accepted so many tokens at least."""
        deepest = max(self.acceptance_histogram, default=1)
        return {
            depth: sum(count for tau, count in self.acceptance_histogram.items() if tau > depth)
            for depth in range(1, deepest)
        }

    @property
    def mean_acceptance_length(self) -> float:
        """τ̄: tokens gained per row and step, the target's own token included."""
        return _ratio(self.num_accepted + self.num_row_steps, self.num_row_steps)

    @property
    def batch_fill(self) -> float:
        """Rows that ran ÷ rows of the batch, while sequences waited."""
        return _ratio(self.queued_fill_sum, self.queued_steps)

    @property
    def decode_tokens_per_second(self) -> float:
        """Throughput without the steps that compute prompts, as in the paper."""
        return _ratio(self.decode.num_new_tokens, self.decode.total_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Throughput end to end, prompts included."""
        return _ratio(self.num_new_tokens, self.total_seconds)

    def _acceptance(self) -> dict[str, Any]:
        """As vLLM, speculators and SpecForge define it, see ``docs/metrics.md``."""
        drafts, accepted = self.num_row_steps - self.draft_length_histogram[0], list(self.accepted_by_depth.values())
        length, shares = 1 + self.num_accepted / max(drafts, 1), [count / drafts for count in accepted]
        after_right = [count / before for before, count in zip([drafts, *accepted], accepted, strict=False)]
        return {
            "vllm": {"mean_acceptance_length": length, "per_position": shares},
            "speculators": {"eal": length, "full_acc": shares, "cond_acc": after_right},
            "specforge": {"accept_length": self.num_new_tokens / max(self.decode.num_row_steps, 1)},
        }

    def metrics(self) -> dict[str, Any]:
        """All metrics as plain values, with the names of ``docs/metrics.md``."""
        decode, figures = self.decode, {name: getattr(self, name) for name in _FIGURES}
        return (
            figures
            | {name: {str(key): num for key, num in sorted(getattr(self, name).items())} for name in _HISTOGRAMS}
            | {
                "acceptance": self._acceptance(),
                "draft_acceptance_rate": _ratio(self.num_accepted, self.num_drafted),
                "mean_draft_length": _ratio(self.num_drafted, self.num_row_steps),
                "padding_per_new_token": _ratio(decode.input_padding + decode.kv_padding, decode.num_new_tokens),
                "input_padding_tokens": self.input_padding,
                "kv_padding_slots": self.kv_padding,
                "padding_ratio": _ratio(self.padding_ratio_sum, decode.num_steps),
                "num_computed_tokens": self.num_tokens,
                "decode_steps": decode.num_steps,
                "decode_row_steps": decode.num_row_steps,
                "decode_new_tokens": decode.num_new_tokens,
                "decode_computed_tokens": decode.num_tokens,
                "decode_kv_tokens": decode.num_kv_tokens,
                "num_allotted_tokens": self.num_allotted,
                "num_drafted_tokens": self.num_drafted,
                "num_accepted_tokens": self.num_accepted,
                "seconds": {**self.seconds, "total": self.total_seconds, "decode": decode.total_seconds},
                "decode_seconds": dict(decode.seconds),
                "median_decode_step_seconds": statistics.median(self.decode_step_seconds or [0.0]),
                "kv_peak_bytes": self.kv_usage.peak_held,
                "kv_peak_pool_bytes": self.kv_usage.peak_pool,
            }
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
