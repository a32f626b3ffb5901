"""Drafts what pays: each token that is expected to bring more than its seconds bring on the average.

docs/explanation/adaptive.md derives the rule. The idea is that of Liu et al. 2024, "Optimizing Speculative Decoding for
Serving Large Language Models Using Goodput" (SmartSpec). Here each row has a length of its own, which ragged
verification makes free (EMS-SD paper, §3.2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate, compress, product
from operator import ge, mul

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Outcome, StepStats
from emssd_adaptive.cost import KNOWN, Allowance, StepCost
from emssd_adaptive.drafter import DrafterRecord

__all__ = ["AdaptiveBudget", "best_lengths"]

_TRY_TOKENS, _TRY_ROWS = 2, 4  # of a row; at most so many rows, and one in so many
_CONTROLS_SOONER = 4  # a wrong belief costs more while drafting than while not
_FADE = 0.98  # a step, of the recent gain
_CHARGED = 16  # tokens of a row that a drafter has not seen; more of them serve the steps to come
_REST = 32  # the most steps from one look at the rows to the next; they double while nothing pays


class AdaptiveBudget(BudgetPolicy):
    """Before drafting, and again once the drafts are known, keeps the tokens that pay for their time.

    A token is worth the probability that it is accepted with all on the path to it. It pays if that is more than its
    seconds × the rate at which the run makes tokens.

    Args:
        probe_interval: steps without a draft, after which some rows draft once more to see whether it pays by now;
            after a quarter as many steps with drafts, one goes without. Each waits until it takes 0.5 % of the time.
    """

    def __init__(self, probe_interval: int = 32) -> None:
        self._cost, self._records = StepCost(), defaultdict[int, DrafterRecord](lambda: DrafterRecord(probe_interval))
        self._controls, self._is_control = Allowance(-(-probe_interval // _CONTROLS_SOONER)), False  # while drafts pay
        self._names, self._rest, self._pause = tuple[str, ...](), 0, 1  # of the rows; steps until the next look at them
        self._lengths: list[int] = []  # tokens of each row before this step
        self._plain, self._rate = 1.0, 0.0  # seconds of this step without drafts; tokens per second of the run
        self._seconds, self._gain = (0.0, 0.0), 0.0  # fading sums of those without drafts, and with them; their ratio

    @property
    def summary(self) -> str:  # type: ignore[override]  # read-only
        """The gain of drafts of late, by its own estimate."""
        about = f"about {self._gain:.1f} times as fast as without drafts, as budget=adaptive measures it"
        return about if self._gain else ""

    def allot(self, step: BudgetStep) -> list[int]:
        if step.is_first:
            before, self._names = self._names, step.batch.request_ids
            self._rest = max(self._rest - 1, 0) if self._names == before else 0
        if step.is_first and not self._rest:
            self._lengths = [len(row.tokens) for row in step.batch]
            self._plain = self._cost.plain(len(step.batch), sum(self._lengths))
            gain = max(1.0, self._gain)
            self._rate = len(step.batch) / self._plain * gain
            self._is_control = self._gain > 0.0 and self._plain * (1.0 - 1.0 / gain) < self._controls.seconds
        if self._rest:
            return [0] * len(step.limits)
        record = self._records[step.stage]
        record.enter(self._names, self._lengths)
        if self._is_control or not any(step.limits):
            return [0] * len(step.limits)
        budget = (self._try(step, record) if record.tries.seconds else []) or self._choose(step, record)
        if not any(budget) and self._gain > 1.25:  # the text is harder here than it was: its tokens come one by one
            self._rate = len(step.batch) / self._plain
            budget = self._choose(step, record)
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
        """``[B]`` a few tokens of rows that the drafter is least behind, or nothing if there is no time."""
        unseen, budget = record.unseen, [0] * len(step.limits)
        able = sorted((row for row, limit in enumerate(step.limits) if limit), key=unseen.__getitem__)
        for row in able[: min(-(-len(able) // _TRY_ROWS), _TRY_ROWS)]:
            budget[row] = min(step.limits[row], _TRY_TOKENS)
        seconds = record.cost.seconds([1, max(budget), sum(budget), sum(compress(unseen, budget))])
        record.is_try = seconds + sum(self._prices(step, sum(budget))[0]) / self._rate < record.tries.seconds
        return budget if record.is_try else []

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        record = self._records[step.stage]
        if self._rest:  # a grammar forces these tokens
            return draft.lengths
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
        pace, total, schedule = self._cost.pace, sum(stats.seconds.values()), stats.seconds["schedule"]
        if self._cost.line.num_seen > KNOWN and not stats.is_prefill:
            plain, seconds = self._plain * stats.num_new_tokens / stats.num_rows, total / pace
            self._seconds = _FADE * self._seconds[0] + plain, _FADE * self._seconds[1] + seconds
            self._gain = self._seconds[0] / self._seconds[1]
        if self._rest:
            self._controls.count(total / pace, is_other=True, is_try=False)
            for record in self._records.values():
                record.tries.count(total / pace, is_other=False, is_try=False)
            return
        for record, stage in zip(self._records.values(), stats.stages, strict=False):
            record.tries.count(total / pace, is_other=any(stage.drafted), is_try=record.is_try)
            # Choosing is a part of drafting. What is learnt after a step takes as long, and is not in its seconds.
            seconds = (stage.seconds + 2 * schedule / len(stats.stages)) / pace
            record.observe(outcome, stage, seconds, is_prefill=stats.is_prefill)
        self._controls.count(total / pace, is_other=not any(stats.drafted), is_try=self._is_control)
        if stats.is_prefill:
            return  # a token of a prompt costs less than one that is decoded, as many more are computed together
        num_pairs = sum(map(mul, stats.drafted, self._lengths))
        self._cost.observe(stats.num_tokens, sum(self._lengths), num_pairs, total - schedule - stats.seconds["draft"])
        pays = self._cost.line.num_seen <= KNOWN or self._is_control or any(any(stage.budget) for stage in stats.stages)
        self._rest, self._pause = (0, 1) if pays else (self._pause, min(2 * self._pause, _REST))

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id, record in product(request_ids, self._records.values()):
            record.counts.pop(request_id, None)


def best_lengths(worths: Seq[Seq[float]], rises: Seq[float], prices: Seq[float]) -> list[int]:
    """Take nodes, the best first, as long as each is worth more than it costs.

    The nodes that are taken of a row are its first ones. Where a node is worth more than one before it, both count for
    their mean.

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
