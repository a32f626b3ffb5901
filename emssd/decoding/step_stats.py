"""The figures of one step, from what it was and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from emssd.attention import KVUsage, PackedInputs
from emssd.attention.trees import depths
from emssd.decoding.scheduler import Schedule
from emssd.drafting import Draft, Outcome
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
    deep, by_depth = _depths(outcome.draft)
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
        num_adopted_tokens=schedule.num_adopted_tokens,
        stages=tuple(stages),
        depths=deep,
        drafted_by_depth=by_depth,
        confidence=_confidence(outcome),
    )


def _depths(draft: Draft) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``[B]`` the depth of each row's tree, and how many nodes of all rows have each depth, from 1."""
    if draft.parents is None:
        lengths = draft.lengths
        return tuple(lengths), tuple(
            sum(length > depth for length in lengths) for depth in range(max(lengths, default=0))
        )
    rows = [depths(draft.tree(row)) for row in range(draft.num_rows)]
    deep = tuple(max(row, default=0) for row in rows)
    counts = Counter(depth for row in rows for depth in row)
    return deep, tuple(counts[depth] for depth in range(1, max(deep, default=0) + 1))


def _confidence(outcome: Outcome) -> tuple[tuple[float, bool], ...]:
    """How sure the drafter was of each node that the target chose among or against, and whether it was accepted."""
    draft, found = outcome.draft, list[tuple[float, bool]]()
    if draft.confidence is None:
        return ()
    for row, (start, accepted) in enumerate(zip(draft.indptr, outcome.accepted, strict=False)):
        way = {-1, *accepted}
        for node, parent in enumerate(draft.tree(row)):
            if parent in way:
                found.append((draft.confidence[start + node], node in way))
    return tuple(found)
