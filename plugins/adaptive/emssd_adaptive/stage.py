"""Measures of one drafter: how good its drafts are for each row, how long it takes, and when to try it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise

from emssd.attention import depths
from emssd.drafting import BudgetStep, Draft, Outcome, StageStats
from emssd_adaptive.acceptance import Acceptance
from emssd_adaptive.chances import Calibration, levels
from emssd_adaptive.profile import Profile
from emssd_adaptive.regression import FadingRegression

__all__ = ["MAX_BACKOFF", "StageRecord"]

_PROBE_TOKENS = 2
_PROBE_SHARE, _PROBE_ROWS = 4, 4  # one row in so many drafts in a probe, and no more than so many rows
MAX_BACKOFF = 16
_TOKENS = 32.0  # unit of the features
_AT_ONCE, _LATER = 4, 16  # catching up with more tokens than this is charged to as many steps
_REST = 8  # steps
_MOST_VAIN = 8  # drafts


class StageRecord:
    """One drafter, as a budget policy sees it from outside.

    Attributes:
        is_probing: whether this step drafts only to see whether it pays by now.
        num_idle: steps since it last drafted, where it could have.
    """

    def __init__(self, memory: float, probe_interval: int) -> None:
        self.acceptance = Acceptance(memory)
        self._calibration, self._profile = Calibration(), Profile()
        self._confidences: dict[str, Seq[float]] = {}  # of what each row drafted in this step
        self.is_probing = False
        self._seconds = FadingRegression(3)
        self._seen: dict[str, int] = {}  # tokens of each row when it was last drafted for
        self.num_idle, self._probe_interval, self._backoff = 0, probe_interval, 1
        # Drafts did not pay for these rows when that was last worked out; for so many steps it is taken for granted.
        self._rows_at_rest, self._rest = set[str](), 0
        self._num_vain = 0  # drafts of which nothing was verified, since one of which something was
        self._longest, self._longest_seconds = 0, FadingRegression(1)  # of a row, and seconds of drafting so many
        # The most levels of a row's draft so far, and the most nodes that a row whose draft is a tree could have.
        self._deepest, self._most_nodes = 0, 0
        self._depths, self._is_tree = list[int](), False  # of what each row drafted in this step

    def tells_soon(self, seconds: float) -> bool:
        """Whether drafts of any length take less than `seconds`, and then say what they are worth.

        No longer so after several drafts of which nothing was verified.
        """
        return (
            self._profile.is_known and self._num_vain < _MOST_VAIN and self._longest_seconds.coefficients[0] < seconds
        )

    def worths_before(self, request_ids: Seq[str], limits: Seq[int]) -> list[list[float]]:
        """``[B]`` up to each row's limit, what the nodes of a draft that is yet to be made are expected to be worth.

        Of a drafter of chains that does not say how sure it is, a row's acceptance tells. Others draft what cannot be
        known before; so it is what their drafts were worth until now.
        """
        if self._profile.is_known:
            return self._profile.worths(request_ids, limits)
        return self.acceptance.gains(request_ids, limits)

    def worths_of(self, request_ids: Seq[str], draft: Draft) -> list[list[float]]:
        """``[B]`` for each node of a draft, the probability that it is accepted with all on the way to it."""
        trees = [draft.tree(row) for row in range(draft.num_rows)]
        self._is_tree = draft.parents is not None
        self._depths = [max(depths(tree), default=0) for tree in trees] if self._is_tree else draft.lengths
        if draft.confidence is not None:
            confidences = [draft.confidence[start:stop] for start, stop in pairwise(draft.indptr)]
            self._confidences = dict(zip(request_ids, confidences, strict=True))
            worths = self._calibration.worths(trees, confidences)
        elif draft.is_chain:
            worths = self.acceptance.gains(request_ids, draft.lengths)
        else:
            worths = self.acceptance.tree_gains(request_ids, trees)
        if self._profile.is_known or draft.confidence is not None or not draft.is_chain:
            self._profile.observe(request_ids, worths, is_probe=self.is_probing)
        return worths

    def levels(self, num_nodes: int) -> int:
        """The most passes in which so many nodes of a row are drafted.

        Of a chain, each node takes one. Trees are as deep as the deepest so far, but those of more nodes than were
        allowed until now may have a level more for each of them.
        """
        return min(num_nodes, self._deepest + max(0, num_nodes - self._most_nodes))

    @property
    def seconds_per_level(self) -> float:
        """Expected seconds of drafting, for each level of the deepest draft."""
        return self._seconds.coefficients[0]

    @property
    def seconds_per_token(self) -> float:
        """Expected seconds of drafting, for each token of all rows; beside those of a level."""
        return self._seconds.coefficients[1] / _TOKENS

    def catch_up_seconds(self, lengths: Mapping[str, int]) -> list[float]:
        """``[B]`` seconds of showing each row's new tokens to the drafter, as far as they are charged to this step."""
        per_token = self._seconds.coefficients[2] / _TOKENS
        behind = [length - self._seen.get(row, 0) for row, length in lengths.items()]
        return [per_token * (min(tokens, _AT_ONCE) + max(0, tokens - _AT_ONCE) / _LATER) for tokens in behind]

    def rests(self, step: BudgetStep) -> bool:
        """Whether to assume in this step that drafts do not pay, because they did not a few steps ago.

        The assumption ends after 8 steps, with a row that it was not made for, and with each observation of drafts.
        """
        if not self._rest or not self._rows_at_rest.issuperset(_able(step)):
            return False
        self._rest -= 1
        return True

    def rest_unless(self, budget: Seq[int], step: BudgetStep) -> None:
        """If `budget` drafts nothing, assume for the next steps that drafts do not pay."""
        self._rest, self._rows_at_rest = (0, set()) if any(budget) else (_REST, {*_able(step)})

    def wake(self) -> None:
        """Look at drafts again in the next step."""
        self._rest = 0

    def probed(self, budget: list[int], step: BudgetStep, lengths: Mapping[str, int]) -> list[int]:
        """`budget`, or that of a probe if nothing was drafted for long, for rows that the drafter is least behind."""
        self.is_probing = False
        if any(budget):
            self.num_idle, self._backoff = 0, 1
        elif any(step.limits):
            self.num_idle += 1
            if self.num_idle >= self._probe_interval * self._backoff:
                self.num_idle, self._backoff = 0, min(2 * self._backoff, MAX_BACKOFF)
                self.is_probing = True
                able = sorted(_able(step), key=lambda row: lengths[row] - self._seen.get(row, 0))
                chosen = able[: min(-(-len(able) // _PROBE_SHARE), _PROBE_ROWS)]
                rows = zip(step.batch.request_ids, step.limits, strict=True)
                return [min(limit, _PROBE_TOKENS) if row in chosen else 0 for row, limit in rows]
        return budget

    def observe(self, outcome: Outcome, stats: StageStats, lengths: Mapping[str, int], pace: float = 1.0) -> None:
        """Learn from a step; `lengths` are the tokens that each row had before it, `pace` the machine's."""
        names = outcome.batch.request_ids
        self.acceptance.begin_step()
        self._calibration.fade()
        if any(stats.drafted):
            if self.is_probing:
                self.acceptance.look_anew()
            self._observe_rows(names, outcome, stats.drafted)
        if any(stats.budget):
            self.wake()
        if any(self._depths):  # to find nothing is quick, and says nothing about what it takes to draft
            self._see_depths(stats.budget)
            self._num_vain = 0 if any(stats.drafted) else self._num_vain + 1
            if (longest := max(stats.budget)) > self._longest:
                self._longest, self._longest_seconds = longest, FadingRegression(1)
            if longest == self._longest:
                self._longest_seconds.observe([1.0], stats.seconds / pace)
            rows = [row for row, limit in zip(names, stats.budget, strict=True) if limit]
            num_behind = sum([lengths[row] - self._seen.get(row, 0) for row in rows])
            num_levels = self.levels(max(stats.budget))
            self._seconds.observe(
                [float(num_levels), sum(stats.budget) / _TOKENS, num_behind / _TOKENS], stats.seconds / pace
            )
            self._seen |= {row: lengths[row] for row in rows}
        self._confidences, self._depths = {}, []

    def _see_depths(self, budget: Seq[int]) -> None:
        for depth, limit in zip(self._depths, budget, strict=False):  # there is none where nothing was drafted
            self._deepest = max(self._deepest, depth)
            if depth and self._is_tree:
                self._most_nodes = max(self._most_nodes, limit)

    def _observe_rows(self, names: Seq[str], outcome: Outcome, drafted: Seq[int]) -> None:
        draft = outcome.draft
        for name, number, accepted, row in zip(names, drafted, outcome.accepted, range(len(names)), strict=True):
            if not number:
                continue
            if confidences := self._confidences.get(name):
                self._calibration.observe(levels(draft.tree(row), accepted), confidences)
            elif draft.parents is None:
                self.acceptance.observe(name, number, len(accepted))
            else:
                self.acceptance.observe_tree(name, levels(draft.tree(row), accepted))

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these rows."""
        request_ids = list(request_ids)
        self.acceptance.release(request_ids)
        self._profile.release(request_ids)
        self._rows_at_rest.difference_update(request_ids)
        for request_id in request_ids:
            self._seen.pop(request_id, None)


def _able(step: BudgetStep) -> list[str]:
    """The rows that may draft."""
    return [row for row, limit in zip(step.batch.request_ids, step.limits, strict=True) if limit]
