"""The figures of one step, from what it was and what came of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from emssd.attention import KVUsage, PackedInputs
from emssd.decoding.scheduler import Schedule
from emssd.drafting import Outcome
from emssd.metrics.stats import StageStats, StepStats
from emssd.model import ModelOutput

__all__ = ["step_stats"]


def step_stats(
    schedule: Schedule,
    packed: PackedInputs,
    output: ModelOutput,
    outcome: Outcome,
    usage: KVUsage,
    stages: Seq[StageStats],
    num_waiting: int,
) -> StepStats:
    """Count a step whose rows have been advanced; `usage` is that after its commit."""
    drafted = tuple(outcome.draft.lengths)
    num_before = sum(packed.kv_lens[: len(outcome.batch)]) - sum(drafted)
    return StepStats(
        is_prefill=packed.num_tokens > len(outcome.batch) + sum(drafted),
        num_rows=packed.num_rows,
        num_waiting=num_waiting,
        num_tokens=packed.num_tokens,
        num_kv_tokens=sum(packed.kv_lens),
        num_new_tokens=sum(len(row.tokens) for row in outcome.batch) - num_before,
        drafted=drafted,
        acceptance=tuple(len(nodes) + 1 for nodes in outcome.accepted),
        input_padding=output.num_padding,
        kv_padding=usage.padding,
        num_preempted=len(schedule.preempted),
        stages=tuple(stages),
    )
