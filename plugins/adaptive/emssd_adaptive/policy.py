"""Drafts what pays: each token that is expected to bring more than its seconds bring on the average.

docs/explanation/adaptive.md derives the rule. Its idea is that of Liu et al. 2024, "Optimizing Speculative Decoding for
Serving Large Language Models Using Goodput". Here each row has a length of its own (EMS-SD paper, §3.2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate, product
from math import inf
from operator import ge, mul

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Outcome, StepStats
from emssd_adaptive.cost import KNOWN, StepCost
from emssd_adaptive.drafter import DrafterRecord

__all__ = ["AdaptiveBudget", "best_lengths"]

_TRY_TOKENS, _TRY_ROWS = 2, 4  # of a row; at most so many rows, and one in so many
_FADE, _CHARGED = 0.98, 16  # a step, of the recent gain; unseen tokens of a row: more of them serve the steps to come
_TRIES, _LOOKS, _IDLE_LOOKS = 0.005, 0.01, 0.0015  # shares of all time; looks while drafts pay, and while none does
_SEEN, _QUIET, _LEAST = 8, 32, 1.04  # steps that are known, and those without drafts, before a try; a control's gain


class AdaptiveBudget(BudgetPolicy):
    """Before drafting, and again once the drafts are known, keeps the tokens that pay for their time.

    A token is worth the probability that it is accepted with all on the path to it. It pays if that is more than its
    seconds × the rate at which the run makes tokens. A look at the rows takes time, too: the next one waits until it
    was a small share of all. In the steps between, each row drafts as much as at the last look.
    """

    def __init__(self) -> None:
        self._cost, self._records = StepCost(), defaultdict[int, DrafterRecord](DrafterRecord)
        self._names, self._lengths = tuple[str, ...](), list[int]()  # of the rows; their tokens before this step
        self._is_look, self._is_control, self._pays = True, False, True  # a control is a look that drafts nothing
        self._clock = self._next_look = self._next_control = 0.0  # seconds of the run
        self._unlooked = inf  # seconds of scheduling without a look: the least of all
        self._plain, self._rate = 1.0, 0.0  # seconds of this step without drafts; tokens per second of the run
        self._seconds, self._gain = (0.0, 0.0), 0.0  # fading sums of those without drafts, and with them; their ratio

    @property
    def summary(self) -> str:  # type: ignore[override]  # read-only
        """The gain of drafts of late, by its own estimate."""
        about = f"about {self._gain:.1f} times as fast as without drafts, as budget=adaptive measures it"
        return about if self._gain else ""

    def allot(self, step: BudgetStep) -> list[int]:
        if step.is_first:
            self._is_look = self._clock >= self._next_look
            self._names, self._lengths = step.batch.request_ids, [len(row.tokens) for row in step.batch]
        record = self._records[step.stage]
        if not self._is_look:
            return record.as_before(self._names, step.limits)
        if step.is_first:
            self._plain = self._cost.plain(len(step.batch), sum(self._lengths))
            self._rate = len(step.batch) / self._plain * max(1.0, self._gain)
            is_due = self._pays and self._cost.line.num_seen >= _SEEN and self._clock >= self._next_control
            self._is_control = is_due or not any(step.limits)
        record.enter(self._names, self._lengths)
        if self._is_control or not any(step.limits):
            return [0] * len(step.limits)
        record.kept = {}
        if self._clock >= record.next_try and self._cost.line.num_seen >= _SEEN:
            return self._try(step, record)
        budget = self._choose(step, record)
        if not any(budget) and self._gain > 1.25:  # the text is harder here than it was: its tokens come one by one
            self._rate = len(step.batch) / self._plain
            budget = self._choose(step, record)
        if any(budget):
            record.kept = {name: n for name, n, limit in zip(self._names, budget, step.limits, strict=True) if limit}
        return budget

    def _choose(self, step: BudgetStep, record: DrafterRecord) -> list[int]:
        """``[B]`` how much of each row to draft, the time of drafting included."""
        start, per_level, per_token, per_unseen = [self._rate * seconds for seconds in record.cost.coefficients]
        rises, prices = self._prices(step, sum(step.limits))
        spread, laters, lengths = record.spread, record.laters, [0] * len(step.limits)
        worths = {row: record.firsts[row] for row, limit in enumerate(step.limits) if limit}
        catch_up = [per_unseen * min(num_unseen, _CHARGED) for num_unseen in record.unseen]
        count, depth, total, best, best_depth = 0.0, 0, -start, 0.0, 0
        while worths and count < len(rises):
            rise, deeper = rises[int(count)], dict[int, float]()
            depth, total = depth + 1, total - per_level
            for row, worth in worths.items():
                # It turns out to be worth 0 or 1, and is verified in the latter case; or it is worth what is expected.
                price, number = rise + prices[row], spread * worth
                value = worth if price < worth else number
                number += 1.0 - spread if price < worth else 0.0
                surplus = value - price * number - per_token - catch_up[row] * (depth == 1)
                if surplus > 0.0:
                    lengths[row], total, count = depth, total + surplus, count + number
                    if depth < step.limits[row]:
                        deeper[row] = worth * laters[row]
            best, best_depth = max((best, best_depth), (total, depth))
            worths = deeper
        return [min(length, best_depth) for length in lengths]

    def _try(self, step: BudgetStep, record: DrafterRecord) -> list[int]:
        """``[B]`` a few tokens of rows that the drafter is least behind."""
        record.is_try, budget = True, [0] * len(step.limits)
        able = sorted((row for row, limit in enumerate(step.limits) if limit), key=record.unseen.__getitem__)
        for row in able[: min(-(-len(able) // _TRY_ROWS), _TRY_ROWS)]:
            budget[row] = min(step.limits[row], _TRY_TOKENS)
        return budget

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        record = self._records[step.stage]
        if not (self._is_look or record.kept):
            return draft.lengths  # a grammar forces these tokens
        record.see(draft)
        return draft.lengths if record.is_try else best_lengths(record.worths, *self._prices(step, draft.indptr[-1]))

    def _prices(self, step: BudgetStep, count: int) -> tuple[list[float], list[float]]:
        """The cost, in tokens, of verifying one token, a second … up to `count`; and ``[B]`` of a row's own, beside."""
        # Steps grow by an eighth, as nothing is known of what is far beyond.
        num_fixed = sum([row.num_uncached for row in step.batch]) + step.num_other_tokens
        rises = self._cost.rises(num_fixed, min(count, self._cost.largest * 9 // 8 + 1 - len(step.batch)))
        per_pair = self._rate * self._cost.line.coefficients[-1]
        return [self._rate * rise for rise in rises], [per_pair * length for length in self._lengths]

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        total, schedule, num_seen = sum(stats.seconds.values()), stats.seconds["schedule"], self._cost.line.num_seen
        pace, self._unlooked = self._cost.pace, min(self._unlooked, schedule)
        self._clock += total / pace
        if num_seen > KNOWN and not stats.is_prefill:
            plain = self._plain * stats.num_new_tokens / stats.num_rows
            self._seconds = _FADE * self._seconds[0] + plain, _FADE * self._seconds[1] + total / pace
            self._gain = self._seconds[0] / self._seconds[1]
        if not self._is_look:
            return
        if not self._is_control:
            self._pays = num_seen < _SEEN or any(any(stage.budget) for stage in stats.stages)
        elif num_seen >= _SEEN:
            self._next_control = self._clock + total / pace * (1.0 - 1.0 / max(self._gain or 1.25, _LEAST)) / _TRIES
        choosing = (schedule - self._unlooked) / pace
        for record, stage in zip(self._records.values(), stats.stages, strict=False):
            seconds = stage.seconds / pace + choosing / len(stats.stages)
            if record.is_try:  # one that paid is followed by another
                cost = seconds + sum(self._cost.rises(stats.num_tokens - sum(stage.drafted), sum(stage.drafted)))
                cost = cost if sum(map(len, outcome.accepted)) < cost * self._rate else 0.0
                record.next_try = self._clock + max(cost / _TRIES, 2.0 * self._plain)
            elif any(stage.drafted):
                record.next_try = max(record.next_try, self._clock + _QUIET * self._plain)
            record.observe(outcome, stage, seconds, is_prefill=stats.is_prefill)
        is_new = num_seen < (KNOWN if self._pays else _SEEN)
        wait = 0.0 if is_new else choosing / (_LOOKS if self._pays else _IDLE_LOOKS)
        tries = [0.0] if self._pays else [record.next_try for record in self._records.values()]
        self._next_look = max(self._clock + wait, min(tries))
        if stats.is_prefill:
            return  # a token of a prompt costs less than one that is decoded, as many more are computed together
        num_pairs = sum(map(mul, stats.drafted, self._lengths))
        self._cost.observe(stats.num_tokens, sum(self._lengths), num_pairs, total - schedule - stats.seconds["draft"])

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id, record in product(request_ids, self._records.values()):
            record.counts.pop(request_id, None)


def best_lengths(worths: Seq[Seq[float]], rises: Seq[float], prices: Seq[float]) -> list[int]:
    """Take the first nodes of each row, the best of all first, as long as each is worth more than it costs.

    Where a node is worth more than one before it, both count for their mean.

    Args:
        worths: ``[B]`` what each node of a row's draft is worth, in tokens.
        rises: what the first node that is taken costs, the second, …; never falling. No more are taken.
        prices: ``[B]`` what a node of a row costs, beside that.
    """
    nodes = [(price - worth, row) for row, price in enumerate(prices) for worth in _falling(worths[row])]
    nodes.sort()
    lengths = [0] * len(worths)
    for (loss, row), rise in zip(nodes, rises, strict=False):
        if loss + rise >= 0.0:
            break
        lengths[row] += 1
    return lengths


def _falling(worths: Seq[float]) -> Seq[float]:
    """Worths that never rise: the beginning with the largest mean counts for that, and so does the next one."""
    if all(map(ge, worths, worths[1:])):
        return worths
    falling = list[float]()
    while len(falling) < len(worths):
        means = [total / (node + 1) for node, total in enumerate(accumulate(worths[len(falling) :]))]
        falling += [max(means)] * (means.index(max(means)) + 1)
    return falling
