"""What is known of one drafter: how good its drafts are for each row, how long it takes, and when to try it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise

from emssd.drafting import Draft, Outcome, StageStats
from emssd_adaptive.acceptance import Acceptance
from emssd_adaptive.confidence import Calibration
from emssd_adaptive.profile import Profile
from emssd_adaptive.regression import FadingRegression
from emssd_adaptive.siblings import levels

__all__ = ["MAX_BACKOFF", "StageRecord"]

_PROBE_TOKENS = 2
_PROBE_SHARE = 4  # one row in so many drafts in a probe
MAX_BACKOFF = 16
_TOKENS = 32.0  # unit of the features
_AT_ONCE, _LATER = 4, 16  # catching up with more tokens than this is charged to as many steps


class StageRecord:
    """One drafter, as a budget policy sees it from outside.

    Args:
        memory, probe_interval: see `emssd_adaptive.AdaptiveConfig`.

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
        if draft.confidence is not None:
            confidences = [draft.confidence[start:stop] for start, stop in pairwise(draft.indptr)]
            self._confidences = dict(zip(request_ids, confidences, strict=True))
            worths = list(map(self._calibration.worths, trees, confidences))
        elif draft.is_chain:
            worths = self.acceptance.gains(request_ids, draft.lengths)
        else:
            worths = self.acceptance.tree_gains(request_ids, trees)
        if self._profile.is_known or draft.confidence is not None or not draft.is_chain:
            self._profile.observe(request_ids, worths, is_probe=self.is_probing)
        return worths

    @property
    def seconds_per_level(self) -> float:
        """Expected seconds of drafting, for each token of the longest draft."""
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

    def probed(self, budget: list[int], limits: Seq[int]) -> list[int]:
        """`budget`, or that of a probe if nothing was drafted for long."""
        self.is_probing = False
        if any(budget):
            self.num_idle, self._backoff = 0, 1
        elif any(limits):
            self.num_idle += 1
            if self.num_idle >= self._probe_interval * self._backoff:
                self.num_idle, self._backoff = 0, min(2 * self._backoff, MAX_BACKOFF)
                self.is_probing = True
                able = [row for row, limit in enumerate(limits) if limit][::_PROBE_SHARE]
                return [min(limit, _PROBE_TOKENS) if row in able else 0 for row, limit in enumerate(limits)]
        return budget

    def observe(self, outcome: Outcome, stats: StageStats, lengths: Mapping[str, int]) -> None:
        """Learn from a step; `lengths` are the tokens that each row had before it."""
        self._observe_rows(outcome, stats.drafted)
        if any(stats.budget):
            rows = [row.request_id for row, limit in zip(outcome.batch, stats.budget, strict=True) if limit]
            num_behind = sum(lengths[row] - self._seen.get(row, 0) for row in rows)
            features = [float(max(stats.budget)), sum(stats.budget) / _TOKENS, num_behind / _TOKENS]
            self._seconds.observe(features, stats.seconds)
            self._seen |= {row: lengths[row] for row in rows}

    def _observe_rows(self, outcome: Outcome, drafted: Seq[int]) -> None:
        is_chain = outcome.draft.parents is None
        self.acceptance.siblings.fade()
        self._calibration.fade()
        for place, (row, number) in enumerate(zip(outcome.batch, drafted, strict=True)):
            name, accepted = row.request_id, outcome.accepted[place] if number else ()
            if is_chain:
                self.acceptance.observe(name, number, len(accepted))
            else:
                self.acceptance.observe_tree(name, outcome.draft.tree(place)[:number], accepted)
            if confidences := self._confidences.get(name) if number else None:
                for children, taken in levels(outcome.draft.tree(place), accepted):
                    for node in children:
                        self._calibration.observe(confidences[node], node == children[0], node == taken)
        self._confidences = {}

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these rows."""
        request_ids = list(request_ids)
        self.acceptance.release(request_ids)
        self._profile.release(request_ids)
        for request_id in request_ids:
            self._seen.pop(request_id, None)
