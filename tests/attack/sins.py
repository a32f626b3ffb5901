"""Every way to break a drafter's interface that we could think of, also with trees; none may change a token."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from emssd.drafting import Draft

__all__ = ["ALL", "LATE", "OF_TREES", "SINS", "WHEN_TOLD"]


def _other(me: Any, token: int) -> int:
    return (token + 1 + me.rng.randrange(me.vocab_size - 1)) % me.vocab_size


def _edit(me: Any, batch: Any) -> None:
    tokens = me.rng.choice(list(batch)).tokens
    at = me.rng.choice((0, -1, me.rng.randrange(len(tokens))))
    tokens[at] = _other(me, tokens[at])


def _grow(me: Any, batch: Any) -> None:
    me.rng.choice(list(batch)).tokens.append(me.rng.randrange(me.vocab_size))


def _swap(me: Any, batch: Any) -> None:
    row = me.rng.choice(list(batch))
    row.tokens = [_other(me, token) for token in row.tokens]


def _turn(me: Any, batch: Any) -> None:
    me.rng.choice(list(batch)).tokens.reverse()


def _raise(error: BaseException) -> Callable[..., Any]:
    def go(*_: Any) -> Any:
        raise type(error)(*error.args)

    return go


def _after(change: Callable[[Any, Any], None]) -> Callable[..., Draft]:
    """A sin that changes the batch and drafts all the same."""

    def go(me: Any, batch: Any, draft: Draft, budget: Seq[int]) -> Draft:
        change(me, batch)
        return draft

    return go


def _instead(make: Callable[[Any, Draft, list[int]], Any]) -> Callable[..., Any]:
    return lambda me, batch, draft, budget: make(me, draft, list(budget))


def _exit(*_: Any) -> Any:
    sys.exit(0)


def _confident(numbers: Callable[[Any, int], Any]) -> Callable[..., Draft]:
    """The draft, and how sure it is of so many tokens."""
    return lambda me, batch, draft, budget: replace(draft, confidence=numbers(me, draft.token_ids.numel()))


def _announced_late(me: Any, batch: Any, draft: Draft, budget: Seq[int]) -> Draft:
    """A tree of right ways after wrong siblings, by a drafter that drafted chains until now."""
    me.drafts_trees = True
    trees = []
    for row, most in zip(batch, budget, strict=True):
        right = me.will_be(row.request_id)[len(row.tokens) :][: most // 2]
        pairs = [((token + 1) % me.vocab_size, token) for token in right]
        trees.append([(token, 2 * depth - 1) for depth, pair in enumerate(pairs) for token in pair])
    return Draft.from_trees(trees)


def _grown(change: Callable[[Any, list[int]], Any]) -> Callable[..., Draft]:
    """Siblings, as many as it may draft, and their parents changed, if there are any in a step."""

    def go(me: Any, batch: Any, draft: Draft, budget: Seq[int]) -> Draft:
        siblings = Draft.from_trees([(me.rng.randrange(me.vocab_size), -1) for _ in range(most)] for most in budget)
        parents = list(siblings.parents or ())
        return replace(siblings, parents=change(me, parents) if parents else tuple(parents))

    return go


def _one(value: Callable[[Any, int, int], Any]) -> Callable[[Any, list[int]], tuple[Any, ...]]:
    """One node's parent, of the node itself and of the number of nodes in the step."""

    def change(me: Any, parents: list[int]) -> tuple[Any, ...]:
        at = me.rng.randrange(len(parents))
        return tuple(value(me, at, len(parents)) if node == at else parent for node, parent in enumerate(parents))

    return change


def _whole_step(me: Any, batch: Any, draft: Draft, budget: Seq[int]) -> Draft:
    """Chains whose parents are counted over all rows."""
    chains = Draft.from_trees([(0, -1) for _ in range(most)] for most in budget)
    starts = {start for start in chains.indptr if start < chains.indptr[-1]}
    return replace(chains, parents=tuple(-1 if at in starts else at - 1 for at in range(chains.indptr[-1])))


def _ring(me: Any, parents: list[int]) -> tuple[int, ...]:
    return tuple((node + 1) % len(parents) for node in range(len(parents)))


def _taken_back(me: Any, batch: Any, draft: Draft, budget: Seq[int]) -> Draft:
    me.drafts_trees = False
    return Draft.from_trees([(0, -1) for _ in range(most)] for most in budget)


# For drafters of trees alone.
OF_TREES: dict[str, Callable[..., Any]] = {
    "has parents in a ring": _grown(_ring),
    "has a parent in another row": _whole_step,
    "has a huge parent": _grown(_one(lambda me, node, count: 2**70)),
    "has half a parent": _grown(_one(lambda me, node, count: -0.5)),
    "has no parent": _grown(_one(lambda me, node, count: None)),
    "has parents that are a number": _grown(lambda me, parents: 7),
    "has parents of a tensor": _grown(lambda me, parents: torch.tensor(parents)),
    "grows too many nodes": lambda me, batch, draft, budget: Draft.from_trees(
        [(0, -1) for _ in range(most + 1)] for most in budget
    ),
    "takes back that it drafts trees": _taken_back,
}

SINS: dict[str, Callable[..., Any]] = OF_TREES | {
    "says late that it drafts trees": _announced_late,
    "is sure of nothing": _confident(lambda me, count: (math.nan,) * count),
    "is sure in words": _confident(lambda me, count: ("very",) * count),
    "wants endless candidates": lambda me, batch, draft, budget: (
        setattr(me, "num_candidates", 10**9),
        draft,
    )[1],
    # It raises.
    "raises": _raise(RuntimeError("planted in propose")),
    "exits": _exit,
    "stops iteration": _raise(StopIteration()),
    # It changes what it may only read.
    "edits tokens": _after(_edit),
    "grows tokens": _after(_grow),
    "swaps tokens": _after(_swap),
    "turns tokens round": _after(_turn),
    "edits and raises": lambda me, batch, draft, budget: (_edit(me, batch), _exit()),
    "edits an earlier batch": lambda me, batch, draft, budget: (
        [_edit(me, old) for old in me.kept if len(old)],
        draft,
    )[1],
    "zeroes the budget": lambda me, batch, draft, budget: (
        budget.clear() if isinstance(budget, list) else None,
        draft,
    )[1],
    # It returns something else.
    "returns a list": _instead(lambda me, draft, budget: draft.token_ids.tolist()),
    "drafts beyond": _instead(lambda me, draft, budget: Draft.from_chains([[me.vocab_size] * b for b in budget])),
    "goes back": _instead(lambda me, draft, budget: Draft(draft.token_ids, (*draft.indptr[:-1], -1))),
    "drafts nowhere": _instead(lambda me, draft, budget: Draft(draft.token_ids.to("meta"), draft.indptr)),
    "drafts sparsely": _instead(lambda me, draft, budget: Draft(draft.token_ids.to_sparse(), draft.indptr)),
    "drafts offsets of a tensor": _instead(
        lambda me, draft, budget: Draft(draft.token_ids, torch.tensor(draft.indptr))  # type: ignore[arg-type]
    ),
    "wants ever more": lambda me, batch, draft, budget: (setattr(me, "num_speculative_tokens", 10**9), draft)[1],
}

# When it is told what became of its draft, or to forget.
WHEN_TOLD: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "raises when observing": ("observe", _raise(RuntimeError("planted in observe"))),
    "exits when observing": ("observe", _exit),
    "edits tokens when observing": ("observe", _edit),
    "grows tokens when observing": ("observe", _grow),
    "raises when releasing": ("release", _raise(RuntimeError("planted in release"))),
    "exits when releasing": ("release", _exit),
}


def _scribble(me: Any, batch: Any, draft: Draft) -> None:
    """Its tensor becomes the text to come, seldom anything else, and more seldom an id beyond the vocabulary."""
    right: list[int] = []
    for row, length in zip(batch, draft.lengths, strict=False):
        right += me.will_be(row.request_id)[len(row.tokens) :][:length]
    whim = me.rng.random()
    for at, token in enumerate(right):
        draft.token_ids[at] = token if whim < 0.7 else me.rng.randrange(me.vocab_size + (5 if whim > 0.9 else 0))


def _scribble_offsets(me: Any, batch: Any, draft: Draft) -> None:
    draft.indptr[1:] = [0] * (len(draft.indptr) - 1)  # type: ignore[index]  # this drafter's are a list


def _scribble_parents(me: Any, batch: Any, draft: Draft) -> None:
    for parents in (draft.parents, draft.confidence):
        if parents:
            parents[:] = [me.rng.choice((-1, at - 1, at + 1, -9)) for at in range(len(parents))]  # type: ignore[index]


# Between packing and verification, as a thread of its own might.
LATE: dict[str, Callable[[Any, Any, Draft], None]] = {
    "changes its tensor later": _scribble,
    "changes its offsets later": _scribble_offsets,
    "changes its parents later": _scribble_parents,
    "edits tokens later": lambda me, batch, draft: _edit(me, batch),
    "grows tokens later": lambda me, batch, draft: _grow(me, batch),
}

ALL = (*SINS, *WHEN_TOLD, *LATE)
