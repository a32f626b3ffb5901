"""Drafts each token that is expected to bring more than its seconds bring, see docs/explanation/adaptive.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate, compress, product
from math import inf
from operator import ge, mul

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Outcome, StepStats
from emssd_adaptive.cost import StepCost
from emssd_adaptive.drafter import DrafterRecord

__all__ = ["AdaptiveBudget", "best_lengths"]

_TRY_TOKENS, _TRY_ROWS = 2, 4  # of a row; at most so many rows, and one in so many
_FADE, _CHARGED = 0.98, 16  # a step, of the recent gain; unseen tokens of a row: more of them serve the steps to come
_TRIES, _CONTROLS, _LOOKS, _IDLE_LOOKS = 0.003, 0.005, 0.005, 0.001  # shares of all time; looks while none pays
_SEEN, _QUIET, _PAUSE = 8, 32, 32  # steps before looks are rationed; before a try; of a pause, at most
_IN_VAIN, _EARLY = 16, 4  # tokens without an accepted one, after which it looks again; drafts or steps that say little
_LONGER, _WEIGHT, _COLD = 1.2, 3, 0.7  # a control's time ÷ a plain step's, and its weight; what a step leaves of `cold`


class AdaptiveBudget(BudgetPolicy):
    """Before drafting, and again once the drafts are known, keeps the tokens that pay for their time.

    A look at the rows takes time, too. So looks are rare, and a row drafts as much as at the last one.
    """

    def __init__(self) -> None:
        self._cost, self._records = StepCost(), defaultdict[int, DrafterRecord](DrafterRecord)
        # Tokens of each row; steps of the last pause; tokens of pieces of prompts.
        self._lengths, self._num_skipped, self._num_pieces = list[int](), 0, 0
        self._largest = self._most = self._vain = 0  # tokens of the largest step; of the next, at most; drafted in vain
        self._is_look = self._pays = True  # whether this step is a look; whether drafts pay
        self._is_control = self._is_idle = False  # whether this step is a control; whether none drafts until a look
        self._clock, self._next_look, self._last_control = 0.0, 0.0, -inf  # seconds of the run
        # Seconds of scheduling without a look, at least; of an undisturbed look; that trims saved, less a look each.
        self._unlooked, self._choosing, self._saved = inf, 0.0, 0.0
        self._plain, self._rate = 1.0, 0.0  # seconds of this step without drafts; tokens per second of the run
        self._seconds, self._gain = (0.0, 0.0), 0.0  # fading sums of those without drafts, and with them; their ratio

    def allot(self, step: BudgetStep) -> list[int]:
        record, none = self._records[step.stage], [0] * len(step.limits)
        if step.is_first:
            loss, self._num_pieces = self._plain * (_LONGER - 1.0 / max(self._gain, 1.0)), step.num_other_tokens
            is_due = self._pays and self._clock >= self._last_control + loss / _CONTROLS and not self._num_pieces
            is_due = is_due and self._cost.line.num_seen >= _EARLY  # and no row has a prompt, which would hide it
            self._is_control = is_due and all(row.num_uncached == 1 for row in step.batch.rows)
            self._is_look = self._clock >= self._next_look and any(step.limits) and not self._is_control
            if self._is_look or self._is_control:
                self._lengths = [len(row.tokens) for row in step.batch.rows]
                self._plain = self._cost.plain(len(step.batch), sum(self._lengths))
        if self._is_control:
            self._last_control = self._clock
            return none
        if not self._is_look:
            rows = zip(step.batch.rows, step.limits, strict=True)
            return [min(record.kept.get(row.request_id, record.usual), n) for row, n in rows] if record.kept else none
        record.enter(step.batch.request_ids, self._lengths)
        if not any(step.limits):
            return none
        if self._clock >= record.next_try and self._cost.line.num_seen >= _SEEN:
            record.is_try, able = True, sorted(compress(range(len(none)), step.limits), key=record.unseen.__getitem__)
            able = able[: min(-(-len(able) // _TRY_ROWS), _TRY_ROWS)]  # the drafter is least behind with these rows
            return [min(limit, _TRY_TOKENS * (row in able)) for row, limit in enumerate(step.limits)]
        record.kept, self._rate = {}, len(step.batch) / self._plain * max(1.0, self._gain)
        if not any(budget := self._choose(step, record)) and self._gain > 1.25:  # the text is harder here than it was
            self._rate = len(step.batch) / self._plain
            budget = self._choose(step, record)
        if any(budget):
            record.kept = dict(compress(zip(step.batch.request_ids, budget, strict=True), step.limits))
        return budget

    def _choose(self, step: BudgetStep, record: DrafterRecord) -> list[int]:
        """``[B]`` how much of each row to draft, the time of drafting included."""
        rises, prices, rate = self._prices(step, record, sum(step.limits))
        start, per_level, per_token, per_unseen = [rate * seconds for seconds in record.cost.coefficients]
        spread, laters, lengths = record.spread, record.laters, [0] * len(step.limits)
        worths = {row: record.firsts[row] for row, limit in enumerate(step.limits) if limit}
        catch_up = [per_unseen * min(num_unseen, _CHARGED) for num_unseen in record.unseen]
        count, depth, total, best, best_depth = 0.0, 0, -start, 0.0, 0
        while worths and count < len(rises):
            rise, deeper = min(rises[int(count) : int(count) + 2]), dict[int, float]()  # trims know about jumps
            depth, total = depth + 1, total - per_level
            for row, worth in worths.items():
                # It turns out to be worth 0 or 1, and is verified in the latter case; or it is worth what is expected.
                price, pays = rise + prices[row], rise + prices[row] < worth
                value, number = worth if pays else spread * worth, spread * worth + (1.0 - spread) * pays
                surplus = value - price * number - per_token - catch_up[row] * (depth == 1)
                if surplus > 0.0:
                    lengths[row], total, count = depth, total + surplus, count + number
                    if depth < step.limits[row]:
                        deeper[row] = worth * laters[row]
            best, best_depth = max((best, best_depth), (total, depth))
            worths = deeper
        return [min(length, best_depth) for length in lengths]

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        record = self._records[step.stage]
        lengths, count = draft.lengths, draft.indptr[-1]
        # Between looks, a grammar forces tokens where none is kept; and trims may save less than they take.
        if self._is_look or (record.kept and (self._saved > 0.0 or count + len(lengths) > self._most)):
            record.see(draft, step.batch.request_ids)
            if not record.is_try:
                rises, prices, rate = self._prices(step, record, count)
                lengths = best_lengths(record.worths, rises, prices)
                rows = zip(record.worths, lengths, prices, strict=True)
                saved = sum(rises[sum(lengths) :]) + sum([price - worth for row, n, price in rows for worth in row[n:]])
                self._saved = 0.9 * self._saved + max(saved, 0.0) / (rate or 1.0) - self._choosing
                if draft.confidence is None:  # so the next ones would be cut likewise
                    cut = zip(step.batch.request_ids, lengths, draft.lengths, strict=True)
                    record.kept |= {name: n for name, n, length in cut if n < length}
                record.usual = -(-sum(record.kept.values()) // max(len(record.kept), 1))
        if any(lengths) and not record.is_try:
            record.next_try = max(record.next_try, self._clock + _QUIET * self._plain)
        return lengths

    def _prices(self, step: BudgetStep, record: DrafterRecord, count: int) -> tuple[list[float], list[float], float]:
        """Costs, in tokens: of verifying one token, a second … up to `count`; ``[B]`` of a row's own; of a second."""
        # What few drafts took counts for less, so that one that was slow by chance is not the last.
        rate, rows = self._rate * record.num_drafts / (record.num_drafts + 1), step.batch.rows
        # Tokens of prompts are left out, as many are computed together.
        num_fixed, per_pair = len(rows) + step.num_other_tokens - self._num_pieces, self._cost.line.coefficients[3]
        rises = self._cost.rises(num_fixed, min(count, self._most - len(rows)))
        return [rate * rise for rise in rises], [rate * per_pair * len(row.tokens) for row in rows], rate

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        total, num_skipped = sum(stats.seconds.values()), self._num_skipped - self.pause
        cost, usual = self._cost, total / self._cost.pace  # less what a cold cache adds, but at least half
        elapsed = max(usual - cost.line.coefficients[2] * cost.cold, 0.5 * usual) + num_skipped * self._plain
        self._clock, self._unlooked = self._clock + elapsed, min(self._unlooked, stats.seconds["schedule"])
        if cost.line.num_seen >= _SEEN and not stats.is_prefill:
            plain = self._plain * (stats.num_new_tokens / stats.num_rows + num_skipped)
            faded = [_FADE ** (1 + num_skipped) * seconds for seconds in self._seconds]
            self._seconds = faded[0] + plain, faded[1] + elapsed
            self._gain = self._seconds[0] / self._seconds[1]
        if self._is_look:
            self._learn(outcome, stats)
        if (self._is_look or self._is_control) and not stats.is_prefill:  # a token of a prompt costs less
            num_pairs, self._largest = sum(map(mul, stats.drafted, self._lengths)), max(self._largest, stats.num_tokens)
            seconds = total - stats.seconds["schedule"] - stats.seconds["draft"]
            cost.observe(stats.num_tokens, sum(self._lengths), num_pairs, seconds, _WEIGHT if self._is_control else 1)
        cost.cold = 1.0 if stats.is_prefill else cost.cold * _COLD ** (1 + num_skipped)
        self._vain = 0 if any(outcome.accepted) else self._vain + sum(stats.drafted)
        if self._vain >= _IN_VAIN and not self._is_idle:
            self._next_look = self._clock
        if self._largest:  # steps grow by four tokens or an eighth, and by what was accepted
            self._most = self._largest + max(4, self._largest // 8) + max(0, stats.num_new_tokens - stats.num_rows)
        idle = self._next_look - self._clock if self._is_idle else 0.0
        self._num_skipped = self.pause = max(0, int(min(idle / self._plain, _PAUSE)))

    def _learn(self, outcome: Outcome, stats: StepStats) -> None:
        if self._gain:
            self.summary = f"about {self._gain:.1f} times as fast as without drafts, as budget=adaptive measures it"
        stages = [*zip(self._records.values(), stats.stages, strict=False)]
        self._is_idle = not any(any(record.kept.values()) for record in self._records.values())
        self._pays = self._cost.line.num_seen < _SEEN or not self._is_idle or any(record.is_try for record, _ in stages)
        choosing = (stats.seconds["schedule"] - self._unlooked) / self._cost.pace
        self._choosing = min(choosing, 1.5 * self._choosing or choosing)  # a busy machine may hold up a look
        for record, stage in stages:
            seconds = stage.seconds / self._cost.pace + choosing / len(stages)
            record.observe(outcome, stage, seconds, is_prefill=stats.is_prefill)
            if record.is_try:  # one that paid is followed by another
                cost = seconds + sum(self._cost.rises(stats.num_tokens - sum(stage.drafted), sum(stage.drafted)))
                cost *= sum(map(len, outcome.accepted)) < cost * self._rate
                longest = _QUIET * record.num_drafts * self._plain if record.num_drafts <= _EARLY else inf
                record.next_try = self._clock + max(min(cost / _TRIES, longest), 2.0 * self._plain)
            record.is_try = False
        wait = 0.0 if self._cost.line.num_seen < _SEEN else self._choosing / (_LOOKS if self._pays else _IDLE_LOOKS)
        tries = [0.0] if self._pays else [record.next_try for record in self._records.values()]
        self._next_look = max(self._clock + wait, min(tries))

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id, record in product(request_ids, self._records.values()):
            record.counts.pop(request_id, None)


def best_lengths(worths: Seq[Seq[float]], rises: Seq[float], prices: Seq[float]) -> list[int]:
    """``[B]`` how many of each row's first nodes to take, so that they bring the most.

    The first that is taken costs ``rises[0]``, the second ``rises[1]``, …; and a node of a row its price, beside that.
    """
    nodes = sorted((price - worth, row) for row, price in enumerate(prices) for worth in _falling(worths[row]))
    losses = [0.0, *accumulate(loss + rise for (loss, _), rise in zip(nodes, rises, strict=False))]
    taken = [row for _, row in nodes[: losses.index(min(losses))]]
    return [taken.count(row) for row in range(len(worths))]


def _falling(worths: Seq[float]) -> list[float]:
    """Worths that never rise: the beginning with the largest mean counts for that, and so does the next one."""
    if all(map(ge, worths, worths[1:])):
        return [*worths]
    mean, length = max((total / number, -number) for number, total in enumerate(accumulate(worths), start=1))
    return [mean] * -length + _falling(worths[-length:])
