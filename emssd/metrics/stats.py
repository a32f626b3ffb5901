"""Figures of a run, and of its steps; every metric here is defined in ``docs/metrics.md``."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from emssd.attention import KVUsage

__all__ = ["NUM_TIMED_STEPS", "PHASES", "RunReport", "StageStats", "StepStats"]

PHASES = ("schedule", "draft", "plan", "forward", "mask", "verify", "other")


@dataclass(frozen=True, slots=True)
class StageStats:
    """The figures of one drafter in a step.

    Attributes:
        budget, drafted: ``[B]`` what each row was allowed to draft; tokens of it that were verified.
        seconds: inside the drafter's `propose`.
    """

    budget: tuple[int, ...]
    drafted: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class StepStats:
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
    seconds: dict[str, float] = field(default_factory=dict)
    stages: tuple[StageStats, ...] = ()
    depths: tuple[int, ...] = ()
    drafted_by_depth: tuple[int, ...] = ()
    confidence: tuple[tuple[float, bool], ...] = ()


NUM_TIMED_STEPS = 1 << 16


@dataclass(slots=True)
class RunReport:
    """Sums over the steps of a run, and the seconds of its latest `NUM_TIMED_STEPS` decode steps for their median."""

    num_steps: int = 0
    num_row_steps: int = 0
    num_tokens: int = 0
    num_new_tokens: int = 0
    num_allotted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    input_padding: int = 0
    kv_padding: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    decode_steps: int = 0
    decode_padding: int = 0
    decode_row_steps: int = 0
    decode_computed_tokens: int = 0
    decode_kv_tokens: int = 0
    decode_phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    decode_step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMED_STEPS))
    padding_ratio_sum: float = 0.0
    num_preempted: int = 0
    num_adopted_tokens: int = 0
    queued_steps: int = 0
    queued_fill_sum: float = 0.0
    acceptance_histogram: Counter[int] = field(default_factory=Counter)
    draft_length_histogram: Counter[int] = field(default_factory=Counter)
    draft_depth_histogram: Counter[int] = field(default_factory=Counter)
    drafted_by_depth: Counter[int] = field(default_factory=Counter)
    drafted_by_confidence: Counter[float] = field(default_factory=Counter)  # by tenths
    accepted_by_confidence: Counter[float] = field(default_factory=Counter)
    kv_usage: KVUsage = field(default_factory=KVUsage)

    def add(self, step: StepStats, batch_size: int) -> None:
        """Count one step of an engine that runs up to `batch_size` rows."""
        self.num_steps += 1
        self.num_row_steps += len(step.acceptance)
        self.num_tokens += step.num_tokens
        self.num_new_tokens += step.num_new_tokens
        self.num_allotted += sum([sum(stage.budget) for stage in step.stages])
        self.num_drafted += sum(step.drafted)
        self.num_accepted += sum(step.acceptance) - len(step.acceptance)
        self.input_padding += step.input_padding
        self.kv_padding += step.kv_padding
        self.num_preempted += step.num_preempted
        self.num_adopted_tokens += step.num_adopted_tokens
        if step.num_waiting:
            self.queued_steps += 1
            self.queued_fill_sum += step.num_rows / batch_size
        self.acceptance_histogram.update(step.acceptance)
        self.draft_length_histogram.update(step.drafted)
        self.draft_depth_histogram.update(step.depths)
        self.drafted_by_depth.update(dict(enumerate(step.drafted_by_depth, start=1)))
        for sure, is_accepted in step.confidence:
            tenth = min(int(10 * sure), 9) / 10
            self.drafted_by_confidence[tenth] += 1
            self.accepted_by_confidence[tenth] += is_accepted
        for phase, seconds in step.seconds.items():
            self.seconds[phase] += seconds
        if not step.is_prefill:
            longest, seconds = max(step.acceptance), sum(step.seconds.values())
            self.decode_steps += 1
            self.decode_row_steps += len(step.acceptance)
            self.decode_tokens += step.num_new_tokens
            self.decode_computed_tokens += step.num_tokens
            self.decode_kv_tokens += step.num_kv_tokens
            self.decode_seconds += seconds
            self.decode_step_seconds.append(seconds)
            for phase, part in step.seconds.items():
                self.decode_phases[phase] += part
            self.decode_padding += step.input_padding + step.kv_padding
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
    def total_seconds(self) -> float:
        """Seconds spent in steps."""
        return sum(self.seconds.values())

    @property
    def mean_acceptance_length(self) -> float:
        """τ̄: tokens gained per row and step, the target's own token included."""
        return (self.num_accepted + self.num_row_steps) / self.num_row_steps if self.num_row_steps else 0.0

    @property
    def batch_fill(self) -> float:
        """Rows that ran ÷ rows of the batch, while sequences waited."""
        return self.queued_fill_sum / self.queued_steps if self.queued_steps else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Throughput without the steps that compute prompts, as in the paper."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Throughput end to end, prompts included."""
        return self.num_new_tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def _acceptance(self) -> dict[str, Any]:
        """As vLLM, speculators and SpecForge define it, see ``docs/metrics.md``."""
        drafts, accepted = self.num_row_steps - self.draft_length_histogram[0], list(self.accepted_by_depth.values())
        length, shares = 1 + self.num_accepted / max(drafts, 1), [count / drafts for count in accepted]
        after_right = [count / before for before, count in zip([drafts, *accepted], accepted, strict=False)]
        return {
            "vllm": {"mean_acceptance_length": length, "per_position": shares},
            "speculators": {"eal": length, "full_acc": shares, "cond_acc": after_right},
            "specforge": {"accept_length": self.num_new_tokens / max(self.decode_row_steps, 1)},
        }

    def metrics(self) -> dict[str, Any]:
        """All metrics as plain values, with the names of ``docs/metrics.md``."""
        return {
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_histogram": _by_key(self.acceptance_histogram),
            "draft_length_histogram": _by_key(self.draft_length_histogram),
            "draft_depth_histogram": _by_key(self.draft_depth_histogram),
            "drafted_by_depth": _by_key(self.drafted_by_depth),
            "accepted_by_depth": _by_key(self.accepted_by_depth),
            "drafted_by_confidence": _by_key(self.drafted_by_confidence),
            "accepted_by_confidence": _by_key(self.accepted_by_confidence),
            "acceptance": self._acceptance,
            "draft_acceptance_rate": self.num_accepted / self.num_drafted if self.num_drafted else 0.0,
            "mean_draft_length": self.num_drafted / max(self.num_row_steps, 1),
            "padding_per_new_token": self.decode_padding / max(self.decode_tokens, 1),
            "input_padding_tokens": self.input_padding,
            "kv_padding_slots": self.kv_padding,
            "padding_ratio": self.padding_ratio_sum / max(self.decode_steps, 1),
            "batch_fill": self.batch_fill,
            "num_preempted": self.num_preempted,
            "num_adopted_tokens": self.num_adopted_tokens,
            "num_steps": self.num_steps,
            "num_row_steps": self.num_row_steps,
            "num_computed_tokens": self.num_tokens,
            "decode_steps": self.decode_steps,
            "decode_row_steps": self.decode_row_steps,
            "decode_new_tokens": self.decode_tokens,
            "decode_computed_tokens": self.decode_computed_tokens,
            "decode_kv_tokens": self.decode_kv_tokens,
            "num_new_tokens": self.num_new_tokens,
            "num_allotted_tokens": self.num_allotted,
            "num_drafted_tokens": self.num_drafted,
            "num_accepted_tokens": self.num_accepted,
            "seconds": {**self.seconds, "total": self.total_seconds, "decode": self.decode_seconds},
            "decode_seconds": dict(self.decode_phases),
            "median_decode_step_seconds": statistics.median(self.decode_step_seconds or [0.0]),
            "kv_peak_bytes": self.kv_usage.peak_held,
            "kv_peak_pool_bytes": self.kv_usage.peak_pool,
        }


def _by_key(counts: Mapping[Any, int]) -> dict[str, int]:
    """`counts` in order, with keys as JSON has them."""
    return {str(key): counts[key] for key in sorted(counts)}
