"""`Draft`, which a drafter proposes, and `Outcome`, the result of verifying it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from operator import index, sub
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from emssd.attention.packed import on_device
from emssd.attention.trees import Parents, depths, is_chain
from emssd.drafting.growth import Tree
from emssd.drafting.hidden import HiddenStates
from emssd.errors import DraftError

if TYPE_CHECKING:
    from emssd.sequences import Batch

__all__ = ["check_ids"]


class DraftExtra(Protocol):
    """Knowledge of a drafter about the tokens of one row, for a rule of verification. The engine only passes it on."""

    def pick(self, nodes: Seq[int], /) -> DraftExtra:
        """The same for these nodes alone."""

    def check(self, tree: Parents, vocab_size: int, /) -> None:
        """Raises DraftError: it does not fit a row with this tree."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens of a whole batch: one token tree per row, ragged, a chain being the special case.

    Row ``i`` holds nodes ``indptr[i]:indptr[i + 1]``. A parent comes before its children, so that the first nodes of a
    row, however many, are a tree. The nodes that are most likely to be accepted come first.

    Attributes:
        token_ids: ``[num_draft]`` int64, on any device.
        indptr: ``[B + 1]`` host integers with a leading zero.
        parents: ``[num_draft]`` host integers, for each node the index *within its row* of its parent, ``-1`` for
            a child of the sequence's newest token. ``None``: every row is a chain.
        confidence: ``[num_draft]`` host numbers from 0 to 1: how sure the drafter is that a node follows its parent.
            ``None``: it does not say.
        extra: ``[B]`` what a rule of verification must know of a row's tokens; ``None`` for other rows, or for all. No
            token of a row that has it may be dropped for what it is, so such a row is verified whole.
    """

    token_ids: torch.Tensor
    indptr: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    confidence: tuple[float, ...] | None = None
    extra: tuple[DraftExtra | None, ...] | None = None

    @classmethod
    def from_chains(cls, chains: Iterable[Seq[int]], confidence: Iterable[Seq[float]] | None = None) -> Draft:
        """A draft of one chain of token ids per row, possibly empty.

        Raises DraftError: `confidence` has another shape.
        """
        rows = [list(tokens) for tokens in chains]
        lengths = list(map(len, rows))
        token_ids = torch.tensor([*chain.from_iterable(rows)], dtype=torch.int64)
        return cls(token_ids, (0, *accumulate(lengths)), confidence=_flat(confidence, lengths))

    @classmethod
    def from_trees(cls, trees: Iterable[Seq[tuple[int, int]]], confidence: Iterable[Seq[float]] | None = None) -> Draft:
        """Like `from_chains`, of one tree per row: its nodes in order, each a token id and its parent, or -1."""
        rows = [list(tree) for tree in trees]
        draft = cls.from_chains([[token for token, _ in row] for row in rows], confidence)
        return replace(draft, parents=tuple(parent for row in rows for _, parent in row))

    @classmethod
    def empty(cls, num_rows: int) -> Draft:
        """A draft of nothing for `num_rows` rows."""
        return cls(torch.empty(0, dtype=torch.int64), (0,) * (num_rows + 1))

    @property
    def num_rows(self) -> int:
        """Rows of the batch that this draft is for."""
        return len(self.indptr) - 1

    @property
    def lengths(self) -> list[int]:
        """Number of drafted tokens of each row."""
        return list(map(sub, self.indptr[1:], self.indptr))

    def tree(self, row: int) -> Parents:
        """The parents of a row's nodes, also where it is a chain."""
        start, stop = self.indptr[row], self.indptr[row + 1]
        return range(-1, stop - start - 1) if self.parents is None else self.parents[start:stop]

    def tokens(self, row: int) -> list[int]:
        """The ids of a row's nodes; if they are on a device, the host waits for them."""
        return list(self.token_ids[self.indptr[row] : self.indptr[row + 1]].tolist())

    def cut(self, lengths: Seq[int]) -> Draft:
        """The first `lengths` nodes of each row, ``[B]``."""
        return self if list(lengths) == self.lengths else self.pick([range(length) for length in lengths])

    def shallow(self, limits: Seq[int]) -> Draft:
        """The nodes of each row that are no deeper than its limit, ``[B]``; a child of the newest token has depth 1."""
        if self.parents is None:
            return self.cut([min(length, limit) for length, limit in zip(self.lengths, limits, strict=True)])
        rows = zip(map(depths, map(self.tree, range(self.num_rows))), limits, strict=True)
        return self.pick([[node for node, depth in enumerate(row) if depth <= limit] for row, limit in rows])

    def pick(self, rows: Seq[Seq[int]]) -> Draft:
        """The nodes `rows` of each row, ``[B]`` ascending indices within the row; with a node its parent is picked."""
        indices = [start + node for start, nodes in zip(self.indptr, rows, strict=False) for node in nodes]
        parents = extra = None
        if self.parents is not None:
            parents = tuple(parent for row, nodes in enumerate(rows) for parent in _renumbered(self.tree(row), nodes))
        if self.extra is not None:
            pairs = zip(self.extra, rows, strict=True)
            extra = tuple([None if claims is None else claims.pick(nodes) for claims, nodes in pairs])
        return Draft(
            self.token_ids[on_device(indices, self.token_ids.device)],
            (0, *accumulate(map(len, rows))),
            parents,
            None if self.confidence is None else tuple([self.confidence[index] for index in indices]),
            extra,
        )

    @property
    def on_host(self) -> bool:
        """Whether the host can read the ids without waiting for a device."""
        return self.token_ids.device.type == "cpu"

    def within(self, vocab_size: int) -> Draft:
        """The same with ids that the host has not seen forced into the vocabulary, so that nobody reads beyond a table.
        The draft itself is verified: an id that this changes is no token of the target's.
        """
        if self.on_host:
            return self
        return replace(self, token_ids=self.token_ids.clamp(0, vocab_size - 1))

    @property
    def is_chain(self) -> bool:
        """Whether every row is a chain."""
        return self.parents is None or all(is_chain(self.tree(row)) for row in range(self.num_rows))

    def check(self, batch: Batch, budget: Seq[int], vocab_size: int, *, trees: bool = False) -> Draft:
        """A copy that keeps the rules of the interface, and that nobody else can write to.

        Ids on a device are checked once verification has brought them to the host, see `check_ids`. What is in `extra`
        is not copied, as it may be large: writing to it changes the claims of the draft.

        Args:
            batch, budget: the arguments of `Drafter.propose`.
            trees: whether the drafter has announced token trees.

        Raises:
            DraftError: it breaks one of the rules in ``docs/reference/drafter_rules.md``.
        """
        ids = self.token_ids
        if not isinstance(ids, torch.Tensor):
            raise DraftError(f"its token_ids are a {type(ids).__name__}; give one int64 tensor")
        if ids.is_meta:
            raise DraftError("its token_ids are on the device meta, where tensors hold nothing; give ids")
        if ids.dtype != torch.int64 or ids.ndim != 1:
            raise DraftError(
                f"its token_ids are {ids.dtype} of {ids.ndim} dimensions; give one int64 tensor of all rows' tokens"
            )
        draft = Draft(
            ids.clone(),
            tuple(map(index, self.indptr)),
            None if self.parents is None else tuple(map(index, self.parents)),
            None if self.confidence is None else tuple(map(float, self.confidence)),
            None if self.extra is None else tuple(self.extra),
        )
        _check_rows(draft, batch, budget)
        if trees or draft.parents:
            _check_trees(draft, batch, trees)
        if draft.extra is not None:
            _check_extra(draft, vocab_size)
        if self.on_host:
            check_ids(draft.token_ids.tolist(), vocab_size)
        return draft


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of verifying a draft. The rows of the batch have been extended when a drafter receives it.

    Attributes:
        batch: the batch that was drafted for, finished rows included.
        draft: what was verified: the beginning of each row's draft, as long as the budget policy decided.
        accepted: per row the accepted nodes of its draft, as indices within the row, in order; for a chain
            ``range(n)``. What an EOS or a length limit later cut off the sequence is not taken out here.
        target_ids: per row the target's next token, and then that after each node of its draft, ``1 + nodes``; after a
            node that was not accepted, too. In a row with `residual` sampling, nothing is drawn there, and it is the
            most probable token.
        candidates: per row, at the same places, the target's best tokens, the best first: the largest
            `Drafter.num_candidates` of all drafters. ``None`` if that is 0.
        hidden: hidden states of the tokens that the step kept, if the drafter has `Drafter.hidden_layers`; also of rows
            that are not in `batch`, as they compute a piece of their prompt.
    """

    batch: Batch
    draft: Draft
    accepted: tuple[Seq[int], ...]
    target_ids: tuple[Seq[int], ...]
    candidates: tuple[Seq[Seq[int]], ...] | None = None
    hidden: HiddenStates | None = None


def _flat(confidence: Iterable[Seq[float]] | None, lengths: list[int]) -> tuple[float, ...] | None:
    if confidence is None:
        return None
    rows = [tuple(row) for row in confidence]
    if (counts := list(map(len, rows))) != lengths:
        raise DraftError(
            f"its confidence has rows of {counts} numbers, and its tokens rows of {lengths}; give one each"
        )
    return tuple(chain.from_iterable(rows))


def _renumbered(parents: Parents, nodes: Seq[int]) -> list[int]:
    numbers = {node: number for number, node in enumerate(nodes)} | {-1: -1}
    return [numbers[parents[node]] for node in nodes]


def _check_rows(draft: Draft, batch: Batch, budget: Seq[int]) -> None:
    indptr, lengths, count = draft.indptr, draft.lengths, draft.token_ids.numel()
    if len(indptr) != 1 + len(batch.rows) or indptr[0] != 0 or indptr[-1] != count:
        raise DraftError(
            f"its draft has {draft.num_rows} rows over {count} tokens (indptr {indptr}), but the batch has "
            f"{len(batch)} rows; return one chain or tree, possibly empty, per row"
        )
    for row, length, limit in zip(batch.rows, lengths, budget, strict=True):
        if not 0 <= length <= limit:
            raise DraftError(
                f"it drafted {length} tokens for request {row.request_id!r} with a budget of {limit}; "
                f"draft at most budget[row] tokens",
                "budget",
            )
    for name, rule, values in (("parents", "tree", draft.parents), ("confidence", "confidence", draft.confidence)):
        if values is not None and len(values) != count:
            raise DraftError(f"its draft has {len(values)} {name} for {count} tokens; give one for each", rule)
    if draft.confidence and not all(0.0 <= number <= 1.0 for number in draft.confidence):
        raise DraftError("its confidence has numbers outside of 0 to 1, or NaN; give probabilities", "confidence")


def _check_trees(draft: Draft, batch: Batch, announced: bool) -> None:
    lengths = draft.lengths
    if draft.parents:
        parents = np.array(draft.parents)
        nodes = np.arange(len(parents)) - np.repeat(draft.indptr[:-1], lengths)  # each node's index within its row
        is_wrong, is_branch = (parents < -1) | (parents >= nodes), parents != nodes - 1
        if is_wrong.any() or (is_branch.any() and not announced):
            node = int((is_wrong if is_wrong.any() else is_branch).argmax())
            name = batch.rows[np.searchsorted(draft.indptr, node, side="right") - 1].request_id
            raise DraftError(
                f"node {nodes[node]} of its tree for request {name!r} has parent {parents[node]}; a parent is an "
                f"earlier node of the same row, or -1 for the row's newest token"
                if is_wrong.any()
                else f"it drafted a token tree for request {name!r}, and its drafts_trees is False; draft a chain, or "
                f"set drafts_trees = True",
                "tree",
            )
    for number, (row, length) in enumerate(zip(batch.rows, lengths, strict=True)):
        deepest = max(0, row.max_length - len(row.tokens) - 1)
        if length > deepest and (depth := max(depths(draft.tree(number)))) > deepest:
            raise DraftError(
                f"its tree for request {row.request_id!r} has depth {depth}, and the row may still generate "
                f"{row.num_remaining} tokens; its depth is at most row.num_remaining - 1 (Draft.shallow cuts it)",
                "depth",
            )


def _check_extra(draft: Draft, vocab_size: int) -> None:
    assert draft.extra is not None
    if len(draft.extra) != draft.num_rows:
        count = len(draft.extra)
        raise DraftError(f"its draft has extra for {count} rows of {draft.num_rows}; give None where there is none")
    for row, extra in enumerate(draft.extra):
        if extra is not None:
            extra.check(draft.tree(row), vocab_size)


def check_ids(token_ids: Seq[int], vocab_size: int) -> None:
    """Raises DraftError: an id is outside the vocabulary."""
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low < 0 or high >= vocab_size:
        raise DraftError(
            f"it drafted token id {low if low < 0 else high}, outside the target's vocabulary "
            f"of {vocab_size}; ids must be in 0..{vocab_size - 1}",
            "vocabulary",
        )


def joined_trees(trees: Iterable[Tree], *, chains: bool = False) -> Draft:
    """A draft of one tree per row; `chains` says that all of them are chains."""
    token_ids, parents, confidence, indptr = list[int](), list[int](), list[float](), [0]
    for tree in trees:
        token_ids += tree.token_ids
        parents += tree.parents
        confidence += tree.confidence
        indptr.append(len(token_ids))
    tokens = torch.tensor(token_ids, dtype=torch.int64)
    return Draft(tokens, tuple(indptr), None if chains else tuple(parents), tuple(confidence))
