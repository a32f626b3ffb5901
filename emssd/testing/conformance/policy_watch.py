"""A budget policy under observation: the rules of the interface are tested in every call; its decisions are kept."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from numbers import Integral
from typing import Any

from emssd.drafting import BudgetPolicy, BudgetStep, Draft, DraftedNode, Outcome, StepStats
from emssd.sequences import Batch
from emssd.testing.conformance.rules import broken, named
from emssd.testing.conformance.watch import state_of, unchanged

__all__ = ["Decided", "WatchedPolicy"]

Decided = tuple[str, tuple[int, ...]]
"""The method, and what it said of each row."""


class WatchedPolicy(BudgetPolicy):
    """Passes every call on to another policy.

    Attributes:
        decisions: what it decided, in order.
    """

    def __init__(self, policy: BudgetPolicy) -> None:
        self.policy = policy
        self.decisions: list[Decided] = []
        self.max_depth = policy.max_depth

    def allot(self, step: BudgetStep) -> list[int]:
        limits, before = list(step.limits), state_of(step.batch)
        with named("budget.raises", f"allot with the limits {limits} in stage {step.stage}"):
            lengths = self.policy.allot(step)
        unchanged(before, step.batch, "allot", "budget.batch")
        return self._decided("allot", lengths, limits)

    def goes_on(self, step: BudgetStep, newest: Seq[Seq[DraftedNode]]) -> list[bool]:
        before = state_of(step.batch)
        with named("budget.raises", f"goes_on of {[len(nodes) for nodes in newest]} nodes in stage {step.stage}"):
            answers = [int(bool(answer)) for answer in self.policy.goes_on(step, newest)]
        unchanged(before, step.batch, "goes_on", "budget.batch")
        return [answer > 0 for answer in self._decided("goes_on", answers, [1] * len(newest))]

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        limits, before = draft.lengths, (state_of(step.batch), draft.token_ids.tolist())
        with named("budget.raises", f"trim of a draft of {limits} tokens in stage {step.stage}"):
            lengths = self.policy.trim(step, draft)
        self._read_only(before, step.batch, draft, "trim")
        return self._decided("trim", lengths, limits)

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        accepted = [len(nodes) for nodes in outcome.accepted]
        before = (state_of(outcome.batch), outcome.draft.token_ids.tolist())
        with named("budget.raises", f"observe of {accepted} accepted tokens"):
            self.policy.observe(outcome, stats)
        self._read_only(before, outcome.batch, outcome.draft, "observe")

    def release(self, request_ids: Iterable[str]) -> None:
        names = list(request_ids)
        with named("budget.raises", f"release of {names}"):
            self.policy.release(names)

    def _read_only(
        self, before: tuple[list[dict[str, Any]], list[int]], batch: Batch, draft: Draft, where: str
    ) -> None:
        unchanged(before[0], batch, where, "budget.batch")
        if (after := draft.token_ids.tolist()) != before[1]:
            broken("budget.batch", f"{where} changed the drafted tokens from {before[1]} to {after}")

    def _decided(self, method: str, lengths: Any, limits: list[int]) -> list[int]:
        """`lengths` as they are, if they are one number for each row, from 0 to its limit."""
        rule = f"budget.{method}"
        with named(rule, f"reading what {method} gave"):
            found = list(lengths)
            if len(found) != len(limits):
                broken(rule, f"{method} gave {found} for {len(limits)} rows; give one number for each")
            for length, limit in zip(found, limits, strict=True):
                if not isinstance(length, Integral) or isinstance(length, bool):
                    broken(rule, f"{method} gave {length!r} among {found}; give whole numbers")
                if not 0 <= int(length) <= limit:
                    broken(
                        rule, f"{method} gave {found}, and the limits are {limits}; give 0 to its limit for each row"
                    )
        self.decisions.append((method, tuple(map(int, found))))
        return found
