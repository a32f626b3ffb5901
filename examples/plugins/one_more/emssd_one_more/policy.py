"""Lets each row draft one token more than it had accepted in its last step."""

from __future__ import annotations

from collections.abc import Iterable

from emssd.drafting import BudgetPolicy, BudgetStep, Outcome, StepStats
from emssd.errors import ConfigError

from emssd_one_more import OneMoreConfig

__all__ = ["OneMoreBudget"]


class OneMoreBudget(BudgetPolicy):
    """A row drafts more as long as its drafts are accepted; else it soon drafts a single token.

    Args:
        config: see `OneMoreConfig`.

    Raises:
        ConfigError: a first length below zero.
    """

    def __init__(self, config: OneMoreConfig) -> None:
        if config.first < 0:
            raise ConfigError(f"budget.first is {config.first}; it must be at least 0")
        self._first = config.first
        self._lengths: dict[str, int] = {}

    def allot(self, step: BudgetStep) -> list[int]:
        wanted = [self._lengths.get(row.request_id, self._first) for row in step.batch]
        return [min(length, limit) for length, limit in zip(wanted, step.limits, strict=True)]

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        for row, accepted in zip(outcome.batch, outcome.accepted, strict=True):
            self._lengths[row.request_id] = 1 + len(accepted)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._lengths.pop(request_id, None)
