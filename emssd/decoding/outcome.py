"""The `Outcome` of a step, for plugins; its figures and its time, for the report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from itertools import chain
from operator import attrgetter

from emssd.attention import KVUsage, PackedInputs
from emssd.attention.trees import depths
from emssd.decoding.scheduler import Schedule
from emssd.drafting import Draft, HiddenStates, Outcome
from emssd.drafting.rule import Verified
from emssd.metrics.stats import PHASES, StageStats, StepStats
from emssd.model import ModelOutput
from emssd.model.run.parallel import Group
from emssd.sequences import Batch

__all__ = ["SharedTimer", "StepTimer", "outcome_of", "step_stats"]


def outcome_of(
    batch: Batch, draft: Draft, verified: Seq[Verified], packed: PackedInputs, output: ModelOutput
) -> Outcome:
    """The outcome of a step whose rows have been advanced. `packed` has rows of the batch, then pieces of prompts."""
    return Outcome(
        batch,
        draft,
        tuple(map(attrgetter("accepted"), verified)),
        tuple(map(attrgetter("target_ids"), verified)),
        tuple([row.candidates or () for row in verified]) if verified and verified[0].candidates is not None else None,
        _hidden(batch, verified, packed, output) if output.hidden else None,
    )


def _hidden(batch: Batch, verified: Seq[Verified], packed: PackedInputs, output: ModelOutput) -> HiddenStates:
    """Hidden states of the tokens that the step kept: prompts, their pieces, newest tokens and accepted nodes."""
    starts, indices, indptr = list[int](), list[int](), [0]
    rows = zip(packed.qo_indptr, packed.lengths, packed.kv_lens, strict=False)
    for row, (begin, length, kv_len) in enumerate(rows):
        starts.append(kv_len - length)
        if row < len(batch):
            origin = begin + length - len(verified[row].drafted)
            kept = [*range(begin, origin), *(origin + node for node in verified[row].accepted)]
            # What an EOS or a limit cut off the row belongs to no token of it.
            indices += kept[: len(batch.rows[row].tokens) - starts[-1]]
        else:
            indices += range(begin, begin + length)
        indptr.append(len(indices))
    layers, states = tuple(output.hidden), tuple(output.hidden.values())
    return HiddenStates(packed.request_ids, tuple(starts), tuple(indptr), layers, states, tuple(indices))


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
    drafted, num_rows, num_tokens = tuple(outcome.draft.lengths), len(outcome.batch.rows), packed.num_tokens
    deep, by_depth = _depths(outcome.draft, drafted)
    num_before = sum(packed.kv_lens[:num_rows]) - sum(drafted)
    return StepStats(
        is_prefill=num_tokens > num_rows + sum(drafted),
        num_rows=packed.num_rows,
        num_waiting=num_waiting,
        num_tokens=num_tokens,
        num_kv_tokens=sum(packed.kv_lens),
        num_new_tokens=sum([len(row.tokens) for row in outcome.batch.rows]) - num_before,
        drafted=drafted,
        acceptance=tuple([len(nodes) + 1 for nodes in outcome.accepted]),
        input_padding=output.num_padding,
        kv_padding=usage.padding,
        num_preempted=len(schedule.preempted),
        num_adopted_tokens=schedule.num_adopted_tokens,
        stages=tuple(stages),
        depths=deep,
        drafted_by_depth=by_depth,
        confidence=_confidence(outcome),
    )


def _depths(draft: Draft, lengths: Seq[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``[B]`` the depth of each row's tree, and how many nodes of all rows have each depth, from 1."""
    rows: Seq[Seq[int]]
    if draft.parents is None:
        rows = [range(1, length + 1) for length in lengths]
    else:
        rows = list(map(depths, map(draft.tree, range(len(lengths)))))
    deep, counts = tuple(map(partial(max, default=0), rows)), Counter(chain.from_iterable(rows))
    return deep, tuple(map(counts.__getitem__, range(1, max(deep, default=0) + 1)))


def _confidence(outcome: Outcome) -> tuple[tuple[float, bool], ...]:
    """The drafter's confidence in each node below an accepted parent, and whether the node was accepted."""
    draft, pairs = outcome.draft, list[tuple[float, bool]]()
    if draft.confidence is None:
        return ()
    for row, (start, accepted) in enumerate(zip(draft.indptr, outcome.accepted, strict=False)):
        path = {-1, *accepted}
        for node, parent in enumerate(draft.tree(row)):
            if parent in path:
                pairs.append((draft.confidence[start + node], node in path))
    return tuple(pairs)


class StepTimer:
    """Times one step; `Engine.step` ends each phase with a `lap`. Its `seconds` go up to the latest lap."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._clock = clock or time.perf_counter
        self._since = self._clock()

    def lap(self, phase: str, **parts: float) -> None:
        """Count the time since the lap before as `phase`, except for `parts`: seconds of it that are other phases."""
        now = self._clock()
        self.seconds[phase] += now - self._since
        self._since = now
        for name, seconds in parts.items():
            self.seconds[name] += seconds
            self.seconds[phase] -= seconds

    def timed(self, stats: StepStats) -> StepStats:
        """`stats` with the seconds of each phase up to now; those since the latest lap are ``other``."""
        self.lap("other")
        return stats._replace(seconds=dict(self.seconds))


class SharedTimer(StepTimer):
    """Gives all ranks of `group` the seconds of rank 0 at the first call of `timed`, so that budget policies decide the
    same in each. The report counts each rank's own.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group, self._is_shared = group, False

    def timed(self, stats: StepStats) -> StepStats:
        stats = super().timed(stats)
        if self._is_shared:
            return stats
        self._is_shared = True
        seconds = self._group.first([*stats.seconds.values(), *(stage.seconds for stage in stats.stages)])
        pairs = zip(stats.stages, seconds[len(PHASES) :], strict=True)
        stages = tuple([stage._replace(seconds=number) for stage, number in pairs])
        return stats._replace(seconds=dict(zip(PHASES, seconds, strict=False)), stages=stages)
