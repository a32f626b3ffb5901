"""Every way to break a drafter's interface that we could think of, also with trees; none may change a token."""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from emssd.drafting import Draft


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


def _exit(*_: Any) -> Any:
    sys.exit(0)


def _announced_late(me: Any, batch: Any, draft: Draft, budget: Seq[int]) -> Draft:
    """A tree of right ways after wrong siblings, by a drafter that drafted chains until now."""
    me.drafts_trees = True
    trees = []
    for row, most in zip(batch, budget, strict=True):
        right = me.will_be(row.request_id)[len(row.tokens) :][: most // 2]
        pairs = [((token + 1) % me.vocab_size, token) for token in right]
        trees.append([(token, 2 * depth - 1) for depth, pair in enumerate(pairs) for token in pair])
    return Draft.from_trees(trees)


def _taken_back(me: Any, batch: Any, draft: Draft, budget: Seq[int]) -> Draft:
    me.drafts_trees = False
    return Draft.from_trees([(0, -1) for _ in range(most)] for most in budget)


# For drafters of trees alone.
OF_TREES: dict[str, Callable[..., Any]] = {"takes back that it drafts trees": _taken_back}

SINS: dict[str, Callable[..., Any]] = OF_TREES | {
    "says late that it drafts trees": _announced_late,
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
