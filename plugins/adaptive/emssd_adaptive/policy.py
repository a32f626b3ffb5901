"""Drafts what pays: each token that is expected to bring more than its seconds bring on the average.

docs/explanation/adaptive.md derives the rule. The idea is that of Liu et al. 2024, "Optimizing Speculative Decoding for
Serving Large Language Models Using Goodput" (SmartSpec). Here each row has a length of its own, which ragged
verification makes free (EMS-SD paper, §3.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import pairwise
from math import inf
from operator import mul

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Outcome, StepStats
from emssd_adaptive.acceptance import FIRST, LATER
from emssd_adaptive.cost import KNOWN, StepCost
from emssd_adaptive.record import Allowance, DrafterRecord

__all__ = ["AdaptiveBudget", "best_lengths"]

_TRY_TOKENS, _TRY_ROWS = 2, 4  # of a row; at most so many rows, and one in so many
_CONTROLS_SOONER = 4  # a wrong belief costs more while drafting than while not
# The first steps draft so much for each row in turn, and all rows together at most so much: a curve has several points.
_TRIALS, _TRIAL_TOKENS = (0, 2, 0, 4), 8
_FADE = 0.95  # a step, of the recent gain
_CHARGED = 16  # tokens of a row that a drafter has not seen; more of them serve the steps to come


class AdaptiveBudget(BudgetPolicy):
    """Before drafting, and again once the drafts are known, keeps the tokens that pay for their time.

    A token is worth the probability that it is accepted with all on the path to it. It pays if that is more than its
    seconds × the rate at which the run makes tokens.
    """

    def __init__(self, memory: float = 16.0, probe_interval: int = 32) -> None:
        self._memory, self._interval = memory, probe_interval
        self._cost, self._records = StepCost(), list[DrafterRecord]()
        # Steps without drafts, while drafts pay.
        self._controls, self._is_control = Allowance(-(-probe_interval // _CONTROLS_SOONER)), False
        self._lengths: list[int] = []  # tokens of each row before this step
        self._plain, self._rate = 1.0, 0.0  # seconds of this step without drafts; tokens per second of the run
        self._recent = self._run = (0.0, 0.0)  # sums of seconds without drafts, and with them; the former fade

    @property
    def summary(self) -> str:  # type: ignore[override]  # read-only
        """The gain of all drafts, by its own estimate."""
        plain, seconds = self._run
        gain = plain / (seconds or 1.0)
        return f"about {gain:.1f} times as fast as without drafts, as budget=adaptive measures it" if gain else ""

    def allot(self, step: BudgetStep) -> list[int]:
        if step.is_first:
            self._lengths = [len(row.tokens) for row in step.batch]
            self._plain = self._cost.plain(len(step.batch), sum(self._lengths))
            gain = max(1.0, self._recent[0] / (self._recent[1] or 1.0))
            self._rate = len(step.batch) / self._plain * gain
            self._is_control = self._controls.covers(self._plain * (1.0 - 1.0 / gain))
        while len(self._records) <= step.stage:
            self._records.append(DrafterRecord(self._memory, self._interval))
        record = self._records[step.stage]
        record.is_try = False
        if self._is_control or not any(step.limits):
            return [0] * len(step.limits)
        if self._cost.line.num_seen < len(_TRIALS):
            most = _TRIALS[self._cost.line.num_seen]
            return [min(limit, most) if most * row < _TRIAL_TOKENS else 0 for row, limit in enumerate(step.limits)]
        if record.tries.is_due and any(budget := self._try(step, record)):
            return budget
        return self._choose(step, record)

    def _choose(self, step: BudgetStep, record: DrafterRecord) -> list[int]:
        """``[B]`` how much of each row to draft, the time of drafting included."""
        start, per_level, per_token, per_unseen = (self._rate * seconds for seconds in record.cost.coefficients)
        rises, prices = self._prices(step, sum(step.limits))
        spread, rest, acceptance, laters = record.spread, 1.0 - record.spread, record.acceptance, dict[int, float]()
        rows = [acceptance.row(name) for name in step.batch.request_ids]
        worths = {index: acceptance.chance(FIRST, row) for index, row in enumerate(rows) if step.limits[index]}
        lengths, count, depth, total, best, best_depth = [0] * len(rows), 0.0, 0, -start, 0.0, 0
        while worths:
            rise, going = rises[int(count)], dict[int, float]()
            depth, total = depth + 1, total - per_level
            for index, worth in worths.items():
                # It turns out to be worth 0 or 1, and is verified in the latter case; or it is worth what is expected.
                price = rise + prices[index]
                surplus = (spread * worth * (1.0 - price) if price < 1.0 else 0.0) - per_token
                surplus += rest * (worth - price) if price < worth else 0.0
                if depth == 1:
                    surplus -= per_unseen * min(self._lengths[index] - rows[index].num_shown, _CHARGED)
                if surplus <= 0.0:
                    continue
                lengths[index], total, count = depth, total + surplus, count + spread * worth + rest
                if depth < step.limits[index]:
                    laters[index] = laters.get(index) or acceptance.chance(LATER, rows[index])
                    going[index] = worth * laters[index]
            if total > best:
                best, best_depth = total, depth
            worths = going
        return [min(length, best_depth) for length in lengths]

    def _try(self, step: BudgetStep, record: DrafterRecord) -> list[int]:
        """``[B]`` a few tokens of rows that the drafter is least behind, if there is time for a try; or nothing."""
        rows = enumerate(zip(step.batch.request_ids, self._lengths, step.limits, strict=True))
        able = sorted((length - record.acceptance.row(name).num_shown, i) for i, (name, length, limit) in rows if limit)
        chosen, budget = able[: min(-(-len(able) // _TRY_ROWS), _TRY_ROWS)], [0] * len(step.limits)
        for _, index in chosen:
            budget[index] = min(step.limits[index], _TRY_TOKENS)
        seconds = record.cost.seconds([1, max(budget), sum(budget), sum(unseen for unseen, _ in chosen)])
        record.is_try = record.tries.covers(seconds + sum(self._prices(step, sum(budget))[0]) / self._rate)
        return budget if record.is_try else [0] * len(budget)

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        lengths = draft.lengths
        if not any(lengths):
            return lengths
        record = self._records[step.stage]
        record.see(step.batch.request_ids, draft)
        if record.is_try or self._cost.line.num_seen < len(_TRIALS):
            return lengths
        return best_lengths(record.worths, *self._prices(step, sum(lengths)))

    def _prices(self, step: BudgetStep, count: int) -> tuple[list[float], list[float]]:
        """The cost of verifying tokens, in tokens: ``[count]`` of the first, of the second …; and ``[B]`` of one
        more of a row, beside that. Of sizes far beyond those of earlier steps nothing is known, so they are ruled out.
        """
        num_fixed = sum([row.num_uncached for row in step.batch]) + step.num_other_tokens
        per_pair = self._rate * self._cost.per_pair
        rises = [self._rate * rise for rise in self._cost.rises(num_fixed, min(count, self._cost.largest * 3 // 2))]
        return rises + [inf] * (count - len(rises)), [per_pair * length for length in self._lengths]

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        pace, total = self._cost.pace, sum(stats.seconds.values())
        for record, stage in zip(self._records, stats.stages, strict=False):
            record.observe(outcome, stage, self._lengths, pace)
            record.tries.count(total / pace, is_other=any(stage.drafted), is_try=record.is_try)
        self._controls.count(total / pace, is_other=not any(stats.drafted), is_try=self._is_control)
        if stats.is_prefill:
            return  # a token of a prompt costs less than one that is decoded, as many more are computed together
        num_pairs = sum(map(mul, stats.drafted, self._lengths))
        self._cost.observe(stats.num_tokens, sum(self._lengths), num_pairs, total - stats.seconds["draft"])
        plain, seconds = self._plain * stats.num_new_tokens / stats.num_rows, total / pace
        if self._cost.line.num_seen > len(_TRIALS):
            self._recent = self._recent if self._recent[0] else (self._plain, self._plain)
            self._recent = _FADE * self._recent[0] + plain, _FADE * self._recent[1] + seconds
        if self._cost.line.num_seen > KNOWN:
            self._run = self._run[0] + plain, self._run[1] + seconds

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        for record in self._records:
            record.acceptance.release(request_ids)


def best_lengths(worths: Seq[Seq[float]], rises: Seq[float], prices: Seq[float]) -> list[int]:
    """Take nodes, the best first, as long as each is worth more than it costs.

    The nodes that are taken of a row are its first ones. Where a node is worth more than one before it, both count for
    their mean.

    Args:
        worths: ``[B]`` what each node of a row's draft is worth, in tokens.
        rises: what the first node that is taken costs, the second, …; never falling.
        prices: ``[B]`` what a node of a row costs, beside that.
    """
    nodes = [(worth - price, row) for row, price in enumerate(prices) for worth in _falling(worths[row])]
    nodes.sort(key=lambda node: -node[0])
    lengths = [0] * len(worths)
    for (surplus, row), rise in zip(nodes, rises, strict=False):
        if surplus <= rise:
            break
        lengths[row] += 1
    return lengths


def _falling(worths: Seq[float]) -> Seq[float]:
    """Worths that never rise: blocks of nodes whose worth rises count for their mean."""
    if all(later <= earlier for earlier, later in pairwise(worths)):
        return worths
    blocks = list[tuple[float, int]]()  # sum and size
    for worth in worths:
        total, size = worth, 1
        while blocks and blocks[-1][0] * size < total * blocks[-1][1]:
            before, number = blocks.pop()
            total, size = before + total, number + size
        blocks.append((total, size))
    return [total / size for total, size in blocks for _ in range(size)]
