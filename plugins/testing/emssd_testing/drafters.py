"""Adversarial drafters: perfect, always wrong, random, of trees; and a budget policy that follows a script.

None may change what is generated.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from emssd.attention.trees import Parents
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, DraftedNode, Drafter
from emssd.sequences import Batch, Row

__all__ = [
    "ChainDrafter",
    "PerfectDrafter",
    "RandomDrafter",
    "ScriptedBudget",
    "TreeDrafter",
    "WrongDrafter",
    "any_parents",
]

_SURE = (0.0, 0.2, 0.7, 1.0)


class _Informed(Drafter):
    """Knows what the target is going to generate.

    Args:
        num_speculative_tokens: the most tokens drafted for one row in one step.
        references: what the target alone generates, by request id or by prompt (a tuple of token ids). A row without
            one is drafted for as if its reference were empty.
        seed: of drafters that draw.
    """

    def __init__(
        self,
        vocab_size: int,
        num_speculative_tokens: int = 4,
        references: Mapping[Any, Seq[int]] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_speculative_tokens = num_speculative_tokens
        self._references = references or {}
        self._random = random.Random(seed)

    def upcoming(self, row: Row) -> list[int]:
        """The target's next tokens of `row`, as far as the reference has them."""
        reference = self._references.get(row.request_id, self._references.get(row.request.prompt_ids, ()))
        return list(reference[len(row.output_ids) :])


class ChainDrafter(_Informed):
    """Drafts a chain for each row by itself."""

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.from_chains(self.chain(row, limit)[:limit] for row, limit in zip(batch, budget, strict=True))

    @abstractmethod
    def chain(self, row: Row, limit: int) -> list[int]:
        """Draft for one row; what lies beyond `limit` is cut off."""


class PerfectDrafter(ChainDrafter):
    """Drafts exactly what the target is going to generate, so that all of it must be accepted."""

    def chain(self, row: Row, limit: int) -> list[int]:
        return self.upcoming(row)


class WrongDrafter(ChainDrafter):
    """Drafts a wrong first token and right ones after it: nothing may be accepted. Needs the references."""

    def chain(self, row: Row, limit: int) -> list[int]:
        upcoming = self.upcoming(row)
        return [(upcoming[0] + 1) % self.vocab_size, *upcoming[1:]] if upcoming else []


class RandomDrafter(ChainDrafter):
    """Drafts of random length, none included: a right beginning of random length, then random ids."""

    def chain(self, row: Row, limit: int) -> list[int]:
        length = self._random.randint(0, limit)
        right = self.upcoming(row)[: self._random.randint(0, length)]
        return right + [self._random.randrange(self.vocab_size) for _ in range(length - len(right))]


class TreeDrafter(_Informed):
    """Drafts trees of random sizes and shapes: chains and nothing at all, siblings, forests, and any other.

    A child of the right path is the right token with some probability, so that right paths wind through the trees, and
    siblings may be equal.

    Args:
        sure: whether it says how sure it is, which means nothing.
    """

    drafts_trees = True

    def __init__(
        self,
        vocab_size: int,
        num_speculative_tokens: int = 8,
        references: Mapping[Any, Seq[int]] | None = None,
        *,
        right: float = 0.5,
        sure: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(vocab_size, num_speculative_tokens, references, seed=seed)
        self._right, self._sure = right, sure

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        draft = Draft.from_trees(self.tree(row, limit) for row, limit in zip(batch, budget, strict=True))
        if self._sure:
            draft = replace(draft, confidence=tuple(self._random.choice(_SURE) for _ in range(draft.indptr[-1])))
        return draft.shallow([max(0, row.num_remaining - 1) for row in batch])

    def tree(self, row: Row, limit: int) -> list[tuple[int, int]]:
        """At most `limit` nodes for one row, each a token and the index of its parent, or -1; of any depth."""
        parents, upcoming = any_parents(self._random.randint(0, limit), self._random), self.upcoming(row)
        depths = {-1: 0}  # nodes of the right path, by their depth
        tokens = []
        for node, parent in enumerate(parents):
            depth = depths.get(parent, len(upcoming))
            is_right = depth < len(upcoming) and self._random.random() < self._right
            tokens.append(upcoming[depth] if is_right else self._random.randrange(self.vocab_size))
            if depth < len(upcoming) and tokens[node] == upcoming[depth]:
                depths[node] = depth + 1
        return list(zip(tokens, parents, strict=True))


def any_parents(num_nodes: int, draw: random.Random) -> Parents:
    """The shape of a tree of `num_nodes` nodes: any at all, a chain, all siblings, or a forest of chains."""
    match draw.choice(["any", "any", "chain", "siblings", "forest"]):
        case "chain":
            return range(-1, num_nodes - 1)
        case "siblings":
            return [-1] * num_nodes
        case "forest":
            num_roots = draw.randint(1, 4)
            return [max(-1, node - num_roots) for node in range(num_nodes)]
    return [draw.randint(-1, node - 1) for node in range(num_nodes)]


class ScriptedBudget(BudgetPolicy):
    """Allots and trims as it is told, whatever the rows are.

    Args:
        script: the ``i``-th decision about a row, counted over all rows and steps, is entry ``i`` modulo the script's
            length: the most tokens to allot, and the most to keep of what was drafted.
        ends: whether it ends drafts between passes, where they have as many levels as it keeps tokens.
    """

    def __init__(self, script: Seq[tuple[int, int]], *, ends: bool = False) -> None:
        self._script = script
        self._num_decisions = 0
        if ends:
            self.goes_on = self._goes_on  # type: ignore[method-assign]  # others are not asked

    def allot(self, step: BudgetStep) -> list[int]:
        self._num_decisions += len(step.batch)
        self._num_levels = 0
        entries = self._entries(len(step.batch))
        return [min(limit, allotted) for limit, (allotted, _) in zip(step.limits, entries, strict=True)]

    def _goes_on(self, step: BudgetStep, newest: Seq[Seq[DraftedNode]]) -> list[bool]:
        self._num_levels += 1
        return [self._num_levels < kept for _, kept in self._entries(len(step.batch))]

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        entries = self._entries(len(step.batch))
        return [min(length, kept) for length, (_, kept) in zip(draft.lengths, entries, strict=True)]

    def _entries(self, num_rows: int) -> list[tuple[int, int]]:
        first = self._num_decisions - num_rows
        return [self._script[(first + row) % len(self._script)] for row in range(num_rows)]
