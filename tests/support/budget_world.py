"""A made-up machine and drafter for budget policies: rows that never end, and a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Self

import numpy as np
import torch

from emssd.decoding.warmup import HeldBudget
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, DraftedNode, Outcome
from emssd.metrics.stats import PHASES, StageStats, StepStats
from emssd.sequences import Batch, Request, Row

Curve = Callable[[int], float]


class World:
    """Runs a policy on rows that never end, with a machine and a drafter that are made up.

    Args:
        policy: the policy.
        num_rows: of the batch.
        seconds: of a step without drafting, by its number of tokens.
        accepts: of so many drafted tokens of a row, how many are accepted.
    """

    def __init__(self, policy: BudgetPolicy, num_rows: int, seconds: Curve, accepts: Callable[[int, int], int]) -> None:
        self.policy, self.seconds, self.accepts = policy, seconds, accepts
        self.rows = [Row(Request(str(i), (1,) * 10, 10**6), num_cached=9) for i in range(num_rows)]
        self.tokens = self.time = 0.0
        self.choosing: Callable[[], float] = lambda: 0.0  # seconds that the policy took for a step
        self.num_steps, self.prompts = 0, set[int]()  # steps so far; those that compute a prompt, too

    def step(self, limits: Seq[int]) -> tuple[list[int], list[int]]:
        """One step. Returns the allotted and the verified lengths."""
        batch, self.num_steps = Batch(tuple(self.rows)), self.num_steps + 1
        if self.policy.pause:  # as in the engine
            self.policy.pause -= 1
            for row in self.rows:
                row.advance([1], None, 0, 0)
            seconds = self.seconds(len(batch))
            self.tokens, self.time = self.tokens + len(batch), self.time + seconds
            return [0] * len(batch), [0] * len(batch)
        step = BudgetStep(batch, tuple(limits))
        budget = list(self.policy.allot(step))
        assert all(0 <= length <= limit for length, limit in zip(budget, limits, strict=True))
        draft = self.draft(budget)
        kept = list(self.policy.trim(step, draft)) if any(budget) else budget  # as the engine does
        assert all(0 <= length <= limit for length, limit in zip(kept, budget, strict=True))
        draft = draft.cut(kept)
        accepted = self.accepted(draft)
        for row, path, length in zip(self.rows, accepted, kept, strict=True):
            row.advance([1] * (len(path) + 1), None, num_drafted=length, num_accepted=len(path))
        gains, num_tokens = tuple(len(path) + 1 for path in accepted), len(batch) + sum(kept)
        stats = StepStats(
            is_prefill=self.num_steps in self.prompts,
            num_rows=len(batch),
            num_waiting=0,
            num_tokens=num_tokens,
            num_kv_tokens=100 * len(batch),
            num_new_tokens=sum(gains),
            drafted=tuple(kept),
            acceptance=gains,
            input_padding=0,
            kv_padding=0,
            num_preempted=0,
            seconds=dict.fromkeys(PHASES, 0.0) | {"forward": self.seconds(num_tokens), "schedule": self.choosing()},
            stages=(StageStats(tuple(budget), tuple(kept), 0.0),),
        )
        self.tokens, self.time = self.tokens + stats.num_new_tokens, self.time + stats.seconds["forward"]
        self.policy.observe(Outcome(batch, draft, tuple(accepted), ()), stats)
        return budget, kept

    def draft(self, budget: Seq[int]) -> Draft:
        """So many tokens of each row."""
        return Draft.from_chains([[1] * length for length in budget])

    def accepted(self, draft: Draft) -> Seq[Seq[int]]:
        """The accepted nodes of each row."""
        return [range(min(length, self.accepts(row, length))) for row, length in enumerate(draft.lengths)]

    def warm(self) -> Self:
        """Show steps of every size, as `emssd.decoding.warmup` does: from steps of one size no curve can be learnt."""
        return self.run_with(8, 0).run_with(8, 2).run_with(8, 5)

    def run_with(self, num_steps: int, num_tokens: int) -> Self:
        """Steps in which each row is held to so many tokens, as in a warm-up."""
        policy, self.policy = self.policy, HeldBudget(self.policy, num_tokens)
        self.run(num_steps, num_tokens)
        self.policy = policy
        return self

    def run(self, num_steps: int, limit: int) -> list[list[int]]:
        """Steps of one limit. Returns what was verified in each."""
        return [self.step([limit] * len(self.rows))[1] for _ in range(num_steps)]


class TreeWorld(World):
    """Its drafter draws trees of one shape (parents). By rank, a child is right with one of `chances`, and
    has a `confidence`.
    """

    def __init__(
        self, policy: BudgetPolicy, shape: Seq[int], seconds: Curve, chances: Seq[float],
        confidence: Callable[[int], float] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(policy, 4, seconds, lambda row, drafted: drafted)
        self.shape, self.chances = tuple(shape), chances
        self.confidence, self._random = confidence, np.random.default_rng(0)
        self.ranks = [self.shape[:node].count(parent) for node, parent in enumerate(shape)]

    def gain(self, num_steps: int) -> float:
        """Tokens per second of so many steps, ÷ those without drafting."""
        self.tokens = self.time = 0.0
        self.run(num_steps, len(self.shape))
        return self.tokens / self.time / (len(self.rows) / self.seconds(len(self.rows)))

    def run(self, num_steps: int, limit: int) -> list[list[int]]:
        return super().run(num_steps, min(limit, len(self.shape)))

    def draft(self, budget: Seq[int]) -> Draft:
        parents = tuple(parent for limit in budget for parent in self.shape[:limit])
        confidence = (
            tuple(self.confidence(rank) for limit in budget for rank in self.ranks[:limit]) if self.confidence else None
        )
        return Draft(torch.ones(sum(budget), dtype=torch.int64), (0, *accumulate(budget)), parents, confidence)

    def accepted(self, draft: Draft) -> Seq[Seq[int]]:
        return [self._path(draft.tree(row)) for row in range(draft.num_rows)]

    def _path(self, tree: Seq[int]) -> list[int]:
        """Down the tree as chance goes; what the target says does not depend on what is verified."""
        path: list[int] = []
        while True:
            rank = int(np.searchsorted(np.cumsum(self.chances), self._random.random(), side="right"))
            children = [node for node, parent in enumerate(tree) if parent == (path[-1] if path else -1)]
            if rank >= min(len(children), len(self.chances)):
                return path
            path.append(children[rank])


class EndsByTurns(BudgetPolicy):
    """Lets the drafts of the rows have one level, two, three and so on, in turn; row by row, and step by step.

    Attributes:
        num_asked: how often it was asked.
        depths: of all drafts of steps in which it was asked.
        told: nodes of all levels.
    """

    def __init__(self) -> None:
        self.num_asked, self.depths, self.told = 0, list[int](), list[DraftedNode]()
        self._num_steps, self._level = 0, 0

    def _most(self, row: int) -> int:
        return 1 + (row + self._num_steps) % 4

    def allot(self, step: BudgetStep) -> Seq[int]:
        self._num_steps += 1
        self._level = 0
        return step.limits

    def goes_on(self, step: BudgetStep, newest: Seq[Seq[DraftedNode]]) -> list[bool]:
        self.num_asked, self._level = self.num_asked + 1, self._level + 1
        assert len(newest) == len(step.batch)
        assert any(newest)
        for row, nodes in enumerate(newest):
            assert not nodes or self._level <= self._most(row), "a row that ended is drafted further"
            self.told += nodes
        return [self._level < self._most(row) for row in range(len(newest))]

    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        if self._level:
            for row in range(draft.num_rows):
                at = {-1: 0}
                for node, parent in enumerate(draft.tree(row)):
                    at[node] = at[parent] + 1
                assert max(at.values()) <= self._most(row)
                self.depths.append(max(at.values()))
        return draft.lengths

    def check(self) -> None:
        """Assert that it ended drafts and saw what can be."""
        assert {1, 2, 3} <= {*self.depths}
        assert all(0 <= node.chance <= node.confidence + 1e-12 and node.confidence <= 1 for node in self.told)
        assert all(node.entropy >= 0 for node in self.told)
        assert len({node.entropy for node in self.told}) > 1
