"""Goodput: choose the drafts of all rows together so that the expected accepted tokens per second are the most.

After Liu et al. 2024, "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (SmartSpec),
with a length of its own for every row, which ragged verification makes free (EMS-SD paper, §3.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Outcome, StepStats
from emssd_adaptive.choice import best_lengths, best_limits
from emssd_adaptive.stage import MAX_BACKOFF, StageRecord
from emssd_adaptive.step_time import Pace, StepTime

__all__ = ["AdaptiveBudget"]

_EVERY_LEVEL = 16
_NEGLIGIBLE = 0.01  # of a step's time
_CHEAP = 0.03  # of it: a drafter that takes less, and says how sure it is, drafts all it can; `trim` then chooses
_CONTROLS_SOONER = 4  # a wrong belief costs more while drafting than while not
# Without a warm-up, the first steps draft little, nothing and more in turn, each row so much, and all together at most
# so many. The last of them drafts all: that shows how deep trees are. Steps of prompts before them draft little, too.
_TRIALS, _TRIAL_TOKENS = (2, 0, 4) * 2, 64
_KNOWN = 24  # steps from which on the machine's pace is told from the curve of its step times


class AdaptiveBudget(BudgetPolicy):
    """Before drafting, and again once the drafts are known, keeps the tokens that pay for their verification.

    A node of a row's draft is worth the probability that it is accepted with all on the way to it. Sorted by that,
    nodes are taken as long as the step's expected rate, ``(B + Σ worth) ÷ (t(tokens, context) + t_draft)``, grows.
    """

    def __init__(self, memory: float = 16.0, probe_interval: int = 32) -> None:
        self._memory, self._probe_interval = memory, probe_interval
        self._time, self._pace = StepTime(), Pace()
        self._stages: list[StageRecord] = []
        self._lengths: dict[str, int] = {}  # tokens of each row before this step
        # Of the earlier stages of this step: drafted tokens, and how many of them are expected to be accepted.
        self._num_drafted, self._gained = 0, 0.0
        # After so many steps with drafts, one without shows what that takes by now; each time after twice as many.
        self._num_drafting, self._control_after, self._is_control = 0, self._first_control, False
        self._seconds = self._plain_seconds = 0.0  # of decoding, and what it is expected to take without drafts

    @property
    def summary(self) -> str:  # type: ignore[override]  # read-only
        """The gain of all drafts, by its own estimate."""
        gain = self._plain_seconds / (self._seconds or 1.0)
        return f"about {gain:.1f} times as fast as without drafts, as budget=adaptive measures it" if gain else ""

    @property
    def _first_control(self) -> int:
        return -(-self._probe_interval // _CONTROLS_SOONER)

    def allot(self, step: BudgetStep) -> list[int]:
        if step.is_first:
            self._lengths = {row.request_id: len(row.tokens) for row in step.batch}
            self._gained, self._num_drafted = 0.0, 0
            self._is_control = self._num_drafting >= self._control_after
        if self._is_control:
            return [0] * len(step.limits)
        while len(self._stages) <= step.stage:
            self._stages.append(StageRecord(self._memory, self._probe_interval))
        record = self._stages[step.stage]
        if not any(step.limits):
            budget = list(step.limits)
        elif self._time.num_observed < len(_TRIALS):  # a curve is not known by one of its points
            budget = _trial(self._time.num_observed, step.limits)
        elif record.rests(step):
            budget = [0] * len(step.limits)
        else:
            budget = self._choose_limits(step, record)
            record.rest_unless(budget, step)
        return record.probed(budget, step, self._lengths)

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        lengths = draft.lengths
        if not any(lengths):
            return lengths
        record = self._stages[step.stage]
        worths = record.worths_of(step.batch.request_ids, draft)
        if not record.is_probing and self._time.is_known:
            tokens, seconds, rises = self._without(step, sum(lengths))
            chosen = best_lengths(worths, tokens, seconds, rises)[0]
        else:
            chosen = lengths
        self._gained += sum(sum(row[:length]) for row, length in zip(worths, chosen, strict=True))
        self._num_drafted += sum(chosen)
        return chosen

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        for record, stage in zip(self._stages, stats.stages, strict=False):
            record.observe(outcome, stage, self._lengths, self._pace.factor)
        if self._is_control:
            for record in self._stages:
                record.wake()
        self._count_control(any(stats.drafted))
        if stats.is_prefill:
            return  # a token of a prompt costs less than one that is decoded, as many more are computed together
        seconds = sum(stats.seconds.values()) - stats.seconds["draft"]
        if self._time.num_observed >= _KNOWN:
            expected = self._time.seconds(stats.num_tokens, stats.num_kv_tokens)
            self._time.observe(stats.num_tokens, stats.num_kv_tokens, seconds / self._pace.factor)
            self._pace.observe(max(expected, 1e-9), max(seconds, 1e-9))
            plain = self._time.seconds(stats.num_rows, sum(self._lengths.values())) * self._pace.factor
            self._plain_seconds += plain * stats.num_new_tokens / stats.num_rows
            self._seconds += seconds + stats.seconds["draft"]
        else:
            self._time.observe(stats.num_tokens, stats.num_kv_tokens, seconds)

    def _count_control(self, has_drafts: bool) -> None:
        """The way back from a wrong belief, such as of a machine that was busy during the steps without drafts."""
        is_probing = any(record.is_probing for record in self._stages)
        self._num_drafting = self._num_drafting + 1 if has_drafts and not is_probing else 0
        if self._is_control:
            self._control_after = min(2 * self._control_after, MAX_BACKOFF * self._probe_interval)
        elif all(record.num_idle for record in self._stages):
            self._control_after = self._first_control

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        for record in self._stages:
            record.release(request_ids)

    def _choose_limits(self, step: BudgetStep, record: StageRecord) -> list[int]:
        """``[B]`` how much of each row to draft for the best expected rate, the time of drafting included."""
        tokens, seconds, rises = self._without(step, sum(step.limits))
        if record.tells_soon(_CHEAP * seconds):
            return list(step.limits)  # `trim` chooses
        worths = record.worths_before(step.batch.request_ids, step.limits)
        for row, catch_up in zip(worths, record.catch_up_seconds(self._lengths), strict=True):
            if row and catch_up:
                first = row[0] - tokens / seconds * catch_up
                row[:] = [min(worth, first) for worth in row]
        per_token, per_level, longest = record.seconds_per_token, record.seconds_per_level, max(step.limits)
        deepest = record.levels(longest)
        levels = [(longest, per_level * deepest)]
        if levels[0][1] > _NEGLIGIBLE * seconds:
            levels = [(number, per_level * number) for number in _depths(deepest)[:-1]] + levels
        return best_limits(worths, tokens, seconds, [rise + per_token for rise in rises], levels)

    def _without(self, step: BudgetStep, count: int) -> tuple[float, float, list[float]]:
        """Expected tokens and seconds of the step without this drafter, and the seconds of up to `count` nodes more."""
        batch = step.batch
        # Prompts are computed sooner or later: what they take in this step is no reason to draft more.
        seconds = self._time.seconds(len(batch) + self._num_drafted, sum(self._lengths.values()))
        num_fixed = sum([row.num_uncached for row in batch]) + step.num_other_tokens
        return len(batch) + self._gained, max(seconds, 1e-9), self._time.rises(num_fixed, count)


def _trial(number: int, limits: Seq[int]) -> list[int]:
    """``[B]`` what the first steps draft, the first of them being number 0."""
    if number == len(_TRIALS) - 1:
        return list(limits)
    found, left = list[int](), _TRIAL_TOKENS
    for limit in limits:
        found.append(min(limit, _TRIALS[number], left))
        left -= found[-1]
    return found


def _depths(most: int) -> list[int]:
    """The longest drafts that are looked at: all of them, or a few if there are many."""
    if most <= _EVERY_LEVEL:
        return list(range(1, most + 1))
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, found[-1] * 3 // 2)))
    return found
