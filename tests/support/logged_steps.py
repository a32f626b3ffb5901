"""`logged_steps`: the figures of single steps, which a report only sums up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from emssd.decoding.engine import Engine
from emssd.drafting import Outcome, StepStats


@contextmanager
def logged_steps(engine: Engine) -> Iterator[list[StepStats]]:
    """The figures of the steps that `engine` takes within, as its budget policy sees them."""
    steps, learn = list[StepStats](), engine.drafting.learn

    def keep(outcome: Outcome, stats: StepStats) -> None:
        steps.append(stats)
        learn(outcome, stats)

    engine.drafting.learn = keep  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del engine.drafting.learn
