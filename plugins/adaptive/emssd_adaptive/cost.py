"""The seconds of a step and of a draft: lines with coefficients that are never negative, fitted while decoding."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul

import numpy as np

__all__ = ["CostLine", "StepCost"]

_KNOWN = 48  # steps, after which the pace is told from the line; before, it would take up the errors of the line
_FADE, _KEPT = 0.5 ** (1 / 200), 1e-6  # an observation; weight of the last coefficients, as a share of it
_SHARE, _STEPS = 1 / 4, 32  # a line is fitted anew with so many more observations, and after so many steps
_KNOTS = (0, 8, 16, 32, 64, 256)  # tokens at which the cost of one more may rise
_GAIN, _RETURN = 0.15, 0.002  # shares of a step's deviation that the pace takes over, and of it that the line does
_RELUCTANCE = [0, *[1] * len(_KNOTS), 1e5, 1e4, 1]  # in a short run, KV hardly changes, and would explain the rest


class CostLine:
    """Learns ``seconds ≈ coefficients · features`` from observations that fade.

    Errors are relative. So long steps do not drown short ones, and a step that a busy machine held up hardly counts.
    Where observations leave a choice, the features with the least `reluctance` take most of the seconds.
    """

    def __init__(self, reluctance: Seq[float]) -> None:
        self.coefficients, self.num_seen, self._new = [0.0] * len(reluctance), 0, list[list[float]]()
        self._gram, self._moment, self._kept = 0.0 * np.outer(reluctance, reluctance), 0.0, _KEPT * np.array(reluctance)

    def observe(self, features: Seq[float], seconds: float, weight: int = 1) -> None:
        """Learn from one observation, which counts `weight` times, at once or with some to come."""
        self._new += [[feature / max(seconds, 1e-9) for feature in features]] * weight
        self.num_seen += 1
        if len(self._new) > min(self.num_seen * _SHARE, _STEPS):
            rows, fade, self._new = np.array(self._new), _FADE ** len(self._new), []
            self._gram, self._moment = self._gram * fade + rows.T @ rows, self._moment * fade + rows.sum(0)
            self._fit()

    def _fit(self) -> None:
        """Least squares without negative coefficients, as by Lawson and Hanson: features enter as long as one helps."""
        sizes = np.sqrt(np.where(self._gram.diagonal() > 0.0, self._gram.diagonal(), 1.0))  # which all become 1
        gram = self._gram / np.outer(sizes, sizes) + np.diag(self._kept)
        moment = self._moment / sizes + self._kept * sizes * self.coefficients
        used = (values := sizes * self.coefficients) > 0.0
        for _ in range(3 * len(sizes)):
            while (solution := np.linalg.solve(gram[np.ix_(used, used)], moment[used])).min(initial=1.0) <= 0.0:
                before, wrong = values[used], solution <= 0.0
                before += (before / (before - solution))[wrong].min() * (solution - before)
                values[used] = np.where(before > 1e-12, before, 0.0)
                used &= values > 0.0
            values[used] = solution
            gradient = np.where(used, 0.0, moment - gram @ values)
            if gradient.max() <= 1e-9 * np.abs(moment).max():
                break
            used[gradient.argmax()] = True
        self.coefficients = (values / sizes).tolist()


class StepCost:
    """Seconds of a step without drafting: a convex curve of its tokens, and parts in proportion to its KV.

    Attributes:
        pace: how many times as long as usual steps take of late. Lines are learnt in seconds ÷ `pace`.
        line: of seconds by tokens beyond some knots, KV, `cold`, and pairs of a drafted token and one of its row.
        largest: tokens of the largest step so far.
        cold: 1 right after a prompt, which has driven the weights out of the processor's caches; less after each step.
    """

    def __init__(self) -> None:
        self.pace, self.line, self.largest, self.cold = 1.0, CostLine(_RELUCTANCE), 0, 0.0

    def observe(self, num_tokens: int, num_kv: int, num_pairs: int, seconds: float, weight: int = 1) -> None:
        """Learn from a step of `num_tokens`, which counts `weight` times; `num_kv` are the tokens that all rows had."""
        pace, tokens = self.pace, [max(0, num_tokens - knot) for knot in _KNOTS]
        features, self.largest = [1, *tokens, num_kv, self.cold, num_pairs], max(self.largest, num_tokens)
        if self.line.num_seen >= _KNOWN:
            # Weighed as `CostLine` weighs errors, so that neither makes the other drift. One quick step changes little.
            speed = min(max(sum(map(mul, self.line.coefficients, features)), 1e-9) * pace / max(seconds, 1e-9), 1.5)
            self.pace = pace ** (1.0 - _RETURN) * (1.0 + _GAIN * speed * (1.0 - speed))
        self.line.observe(features, seconds / pace, weight)

    def plain(self, num_rows: int, num_kv: int) -> float:
        """Expected seconds of a step without drafts; above 0."""
        start, *_, per_kv, _, _ = self.line.coefficients
        return max(start + sum(self.rises(0, num_rows)) + per_kv * num_kv, 1e-9)

    def rises(self, num_tokens: int, count: int) -> list[float]:
        """``[count]`` seconds that each of `count` tokens adds to a step of `num_tokens`; 0 or more, never falling."""
        total, *slopes = self.line.coefficients[:-3]
        rises, stop = list[float](), num_tokens + count
        for knot, end, slope in zip(_KNOTS, (*_KNOTS[1:], 1 << 62), accumulate(slopes), strict=True):
            # No token takes longer than the mean of those before it, whatever a slow step made of sizes that are rare.
            rise = min(slope, total / knot) if knot else slope
            rises += [rise] * (min(end, stop) - max(knot, num_tokens))  # none where that is negative
            total += rise * (end - knot)
        return rises
