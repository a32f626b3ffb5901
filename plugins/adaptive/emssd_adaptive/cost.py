"""The seconds of a step and of a draft: lines with coefficients that are never negative, fitted while decoding."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul

__all__ = ["CostLine", "StepCost"]

_FADE, _KEPT = 0.5 ** (1 / 200), 1e-6  # an observation; weight of the last coefficients, as a share of it
_SHARE, _STEPS, _KNOWN = 1 / 4, 32, 48  # a fit waits for this share more steps, or this many; the pace waits for 48
_KNOTS = (0, 8, 16, 32, 64, 256)  # tokens at which the cost of one more may rise
_JUMPS, _HIGHEST = (16, 32), 1 / 4  # tokens after which a step may jump; a jump's largest share of the step before
_GAIN, _RETURN = 0.15, 0.002  # shares of a step's deviation that the pace takes over, and of it that the line does
_RELUCTANCE = [0, 1e5, 1e4, *[1] * (1 + len(_KNOTS) + len(_JUMPS))]  # KV hardly changes in a short run


class CostLine:
    """Learns ``seconds ≈ coefficients · features`` from observations that fade.

    Errors are relative. So long steps do not drown short ones, and a step that a busy machine held up hardly counts.
    Where observations leave a choice, the features with the least `reluctance` take most of the seconds.
    This is plain Python, as each forward pass drives NumPy's code out of the caches: it took five times as long.
    """

    def __init__(self, reluctance: Seq[float]) -> None:
        self.coefficients, self._kept = [0.0] * len(reluctance), [_KEPT * each for each in reluctance]
        self._gram = [[0.0] * (len(reluctance) + 1) for _ in reluctance]  # a row is an equation, with its right side
        self.num_seen = self._next_fit = 0

    def observe(self, features: Seq[float], seconds: float, weight: int = 1) -> None:
        """Learn from one observation, which counts `weight` times, at once or with some to come."""
        row, fade = [*[feature / max(seconds, 1e-9) for feature in features], 1.0], _FADE**weight
        for index, factor in enumerate([weight * value for value in row[:-1]]):
            self._gram[index] = [fade * a + factor * b for a, b in zip(self._gram[index], row, strict=True)]
        self.num_seen += 1
        if self.num_seen > self._next_fit:
            self._next_fit = self.num_seen + int(min(self.num_seen * _SHARE, _STEPS))
            self._fit()

    def _fit(self) -> None:
        """Least squares without negative coefficients, as by Lawson and Hanson: features enter as long as one helps."""
        values, gram = self.coefficients, [[*row] for row in self._gram]
        for index, row in enumerate(gram):
            kept = self._kept[index] * (row[index] or 1.0)
            row[index], row[-1] = row[index] + kept, row[-1] + kept * values[index]
        used = [index for index, value in enumerate(values) if value > 0.0]
        for _ in range(6 * len(values)):
            rows = [[gram[index][other] for other in (*used, -1)] for index in used]
            for place, pivot in enumerate(rows):  # by elimination, as they are positive definite
                for row in rows[:place] + rows[place + 1 :]:
                    factor = row[place] / pivot[place]
                    row[place:] = [old - factor * other for old, other in zip(row[place:], pivot[place:], strict=True)]
            goals = [(index, row[-1] / row[place]) for place, (index, row) in enumerate(zip(used, rows, strict=True))]
            # As far towards the solution as no coefficient becomes negative; one that becomes 0 leaves.
            ends = [(values[index] / (values[index] - goal), index) for index, goal in goals if goal < 0.0]
            share, leaving = min(ends, default=(1.0, -1))
            for index, goal in goals:
                values[index] = max(0.0, values[index] + share * (goal - values[index]))
            if ends:
                values[leaving] = 0.0
                used.remove(leaving)
                continue
            helps = [(row[-1] - sum(map(mul, row, values))) / row[index] ** 0.5 for index, row in enumerate(gram)]
            if max(helps) < 1e-9 or (best := helps.index(max(helps))) in used:
                break
            used.append(best)


class StepCost:
    """Seconds of a step without drafting: a curve of its tokens that never falls, and parts in proportion to its KV.

    Attributes:
        pace: how many times as long as usual steps take of late. Lines are learnt in seconds ÷ `pace`.
        line: by a constant, KV, `cold`, pairs of a drafted token and one of its row, tokens beyond knots, and jumps.
        cold: 1 right after a prompt, which has driven the weights out of the processor's caches; less after each step.
    """

    def __init__(self) -> None:
        self.pace, self.line, self.cold = 1.0, CostLine(_RELUCTANCE), 0.0

    def observe(self, num_tokens: int, num_kv: int, num_pairs: int, seconds: float, weight: int = 1) -> None:
        """Learn from a step of `num_tokens`, which counts `weight` times; `num_kv` are the tokens that all rows had."""
        pace, tokens = self.pace, [max(0, num_tokens - knot) for knot in _KNOTS]
        features = [1, num_kv, self.cold, num_pairs, *tokens, *[num_tokens > knot for knot in _JUMPS]]
        if self.line.num_seen >= _KNOWN:
            # Weighed as `CostLine` weighs errors, so that neither makes the other drift. One quick step changes little.
            speed = min(max(sum(map(mul, self.line.coefficients, features)), 1e-9) * pace / max(seconds, 1e-9), 1.5)
            self.pace = pace ** (1.0 - _RETURN) * (1.0 + _GAIN * speed * (1.0 - speed))
        self.line.observe(features, seconds / pace, weight)

    def plain(self, num_rows: int, num_kv: int) -> float:
        """Expected seconds of a step without drafts; above 0."""
        return max(self.line.coefficients[0] + self.line.coefficients[1] * num_kv + sum(self.rises(0, num_rows)), 1e-9)

    def rises(self, num_tokens: int, count: int) -> list[float]:
        """``[count]`` seconds that each of `count` tokens adds to a step of `num_tokens`; it falls after jumps only."""
        total, _, _, _, *sizes = self.line.coefficients
        rises, stop, jumps = list[float](), num_tokens + count, dict(zip(_JUMPS, sizes[len(_KNOTS) :], strict=True))
        for knot, end, slope in zip(_KNOTS, (*_KNOTS[1:], 1 << 62), accumulate(sizes), strict=False):
            # No token takes longer than the mean of those before it, whatever a slow step made of sizes that are rare.
            rise, jump = min(slope, total / knot) if knot else slope, min(jumps.get(knot, 0.0), _HIGHEST * total)
            rises += [rise] * (min(end, stop) - max(knot, num_tokens))  # none where that is negative
            if num_tokens <= knot < stop:
                rises[knot - num_tokens] += jump
            total += rise * (end - knot) + jump
        return rises
