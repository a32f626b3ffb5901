"""The paper's appendix: τ_max, δ̄ and r̄ by p and batch size, from the closed forms and from simulated batches."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from emssd.decoding.scheduler import StaticScheduler
from emssd.drafting.budget import FixedBudget
from emssd.simulate.closed_forms import Expected, acceptance_pmf, expected
from emssd.simulate.curves import Roofline
from emssd.simulate.laws import geometric_trace
from emssd.simulate.simulator import Simulator

__all__ = ["QUANTITIES", "Estimate", "Point", "appendix_point", "appendix_points"]

QUANTITIES = ("tau_max", "padding_length", "padding_ratio")
"""Of `Expected`, what the three panels of the paper's figure show."""

_NO_TIME = Roofline(0.0, 0.0, 0.0, 1.0, 1.0)  # a curve on which every step takes no time


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over simulated steps, which are independent.

    Attributes:
        error: its standard error: the steps' sample standard deviation ÷ √steps.
    """

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class Point:
    """One p and batch size.

    Attributes:
        simulated: by name, as in `QUANTITIES`.
    """

    p: float
    batch_size: int
    exact: Expected
    simulated: dict[str, Estimate]


def appendix_point(
    p: float, batch_size: int, *, max_acceptance: int = 8, num_steps: int = 2000, seed: int = 0
) -> Point:
    """`num_steps` steps of a static batch, whose rows are long enough to be there in all of them.

    Args:
        p: probability that a drafted token is right, given that those before it are.
        max_acceptance: the longest τ, one more than the tokens drafted; the paper's figure has 8.
        num_steps: at least 2.
    """
    trace = geometric_trace(
        p,
        batch_size,
        num_speculative_tokens=max_acceptance - 1,
        max_new_tokens=max_acceptance * (num_steps + 1),
        seed=seed,
    )
    run = Simulator(trace, StaticScheduler(batch_size), FixedBudget(), _NO_TIME).run(num_steps)
    taus = np.asarray([step.acceptance for step in run.steps], dtype=np.float64)
    longest = taus.max(axis=1)
    padding = longest - taus.mean(axis=1)
    samples = dict(zip(QUANTITIES, (longest, padding, padding / longest), strict=True))
    exact = expected(acceptance_pmf(p, max_acceptance), batch_size)
    errors = {name: float(values.std(ddof=1)) / num_steps**0.5 for name, values in samples.items()}
    return Point(p, batch_size, exact, {name: Estimate(float(samples[name].mean()), errors[name]) for name in samples})


def appendix_points(
    chances: Iterable[float], batch_sizes: Seq[int], *, max_acceptance: int = 8, num_steps: int = 2000, seed: int = 0
) -> list[Point]:
    """All pairs, each with a seed of its own, counted up from `seed`."""
    pairs = [(p, batch_size) for batch_size in batch_sizes for p in chances]
    return [
        appendix_point(p, batch_size, max_acceptance=max_acceptance, num_steps=num_steps, seed=seed + i)
        for i, (p, batch_size) in enumerate(pairs)
    ]
