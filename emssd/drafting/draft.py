"""`Draft`, which a drafter proposes, and `Outcome`, the result of verifying it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from operator import sub
from typing import TYPE_CHECKING, Protocol

import torch

from emssd.attention.packed import on_device
from emssd.attention.trees import Parents, depths, is_chain
from emssd.errors import DraftError

if TYPE_CHECKING:
    from emssd.sequences import Batch
from collections.abc import Iterator
from itertools import pairwise

__all__ = ["Draft", "DraftExtra", "HiddenStates", "Outcome", "checked_layers"]


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of the tokens that a step computed and kept, ragged: row ``i`` has ``indptr[i]:indptr[i + 1]``.

    The rows are those of the batch, and those that computed a piece of their prompt. A row's tokens come in order, each
    once, and none that was rejected: `starts` is where its latest delivery ended, or 0 for a row that begins, or begins
    anew after `Drafter.release`. Its newest token is not among them, as the target has not seen it yet. (A row that an
    EOS has just cut may have it.)

    Attributes:
        request_ids: ``[P]``.
        starts: ``[P]`` the position of each row's first token in its sequence.
        indptr: ``[P + 1]`` host integers with a leading zero.
        layers: the indices of `states`, see `Drafter.hidden_layers`.
        states: for each of `layers` a tensor ``[n, width]`` on the target's device, in its dtype. They may be kept, and
            are not to be written to.
        places: ``[n]`` where the tokens are in `states`, in the engine; ``None`` in what a drafter gets: they are all.
    """

    request_ids: tuple[str, ...]
    starts: tuple[int, ...]
    indptr: tuple[int, ...]
    layers: tuple[int, ...]
    states: tuple[torch.Tensor, ...]
    places: tuple[int, ...] | None = None

    def rows(self) -> Iterator[tuple[str, int, tuple[torch.Tensor, ...]]]:
        """Request id, position of the first token, and the states ``[n_i, width]`` of each layer, row after row."""
        for name, start, (begin, end) in zip(self.request_ids, self.starts, pairwise(self.indptr), strict=True):
            yield name, start, tuple([states[begin:end] for states in self.states])

    def of(self, layers: Seq[int]) -> HiddenStates:
        """The states of `layers`, in this order, in tensors of their own."""
        states = tuple([self.states[self.layers.index(layer)] for layer in layers])
        if self.places is not None:
            index = on_device(self.places, states[0].device) if states else None
            states = tuple([each[index] for each in states])
        return replace(self, layers=tuple(layers), states=states, places=None)


def checked_layers(layers: object) -> tuple[int, ...]:
    """`Drafter.hidden_layers` as it should be. Raises DraftError: it is something else."""
    if not isinstance(layers, (tuple, list)) or not all(type(layer) is int and layer >= -1 for layer in layers):
        raise DraftError(
            f"its hidden_layers are {layers!r}; give a tuple of integers: 0 for what the target's first layer gets, "
            f"n for what its n-th layer gives, -1 for what its LM head is given"
        )
    if len(set(layers)) < len(layers):
        raise DraftError(f"its hidden_layers are {layers!r}; give each once")
    return tuple(layers)


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
        """A draft of one chain of token ids per row; an empty chain drafts nothing.

        `confidence` is that of each token, in the same shape.

        Raises:
            DraftError: it has another shape.
        """
        rows = [list(each) for each in chains]
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

    def cut(self, lengths: Seq[int]) -> Draft:
        """The first `lengths` nodes of each row, ``[B]``."""
        if list(lengths) == self.lengths:
            return self
        return self.pick([range(length) for length in lengths])

    def shallow(self, limits: Seq[int]) -> Draft:
        """The nodes of each row that are no deeper than its limit, ``[B]``; a child of the newest token has depth 1."""
        if self.parents is None:
            return self.cut([min(length, limit) for length, limit in zip(self.lengths, limits, strict=True)])
        rows = zip(map(depths, map(self.tree, range(self.num_rows))), limits, strict=True)
        return self.pick([[node for node, depth in enumerate(row) if depth <= limit] for row, limit in rows])

    def pick(self, rows: Seq[Seq[int]]) -> Draft:
        """The nodes `rows` of each row, ``[B]`` ascending indices within the row; with a node its parent is picked."""
        places = [start + node for start, nodes in zip(self.indptr, rows, strict=False) for node in nodes]
        parents = extra = None
        if self.parents is not None:
            parents = tuple(parent for row, nodes in enumerate(rows) for parent in _renumbered(self.tree(row), nodes))
        if self.extra is not None:
            extra = tuple(
                None if each is None else each.pick(nodes) for each, nodes in zip(self.extra, rows, strict=True)
            )
        return Draft(
            self.token_ids[on_device(places, self.token_ids.device)],
            (0, *accumulate(map(len, rows))),
            parents,
            None if self.confidence is None else tuple(self.confidence[place] for place in places),
            extra,
        )

    @property
    def on_host(self) -> bool:
        """Whether the host can read the ids without waiting for a device."""
        return self.token_ids.device.type == "cpu"

    def within(self, vocab_size: int) -> Draft:
        """The same with ids that the host has not seen forced into the vocabulary, so that nobody reads beyond a table.

        An id that this changes was no token of the target's, so what is verified is still the draft itself.
        """
        if self.on_host:
            return self
        return replace(self, token_ids=self.token_ids.clamp(0, vocab_size - 1))

    @property
    def is_chain(self) -> bool:
        """Whether every row is a chain."""
        return self.parents is None or all(is_chain(self.tree(row)) for row in range(self.num_rows))


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
    told = None if confidence is None else [tuple(row) for row in confidence]
    if told is not None and (given := list(map(len, told))) != lengths:
        raise DraftError(f"its confidence has rows of {given} numbers, and its tokens rows of {lengths}; give one each")
    return None if told is None else tuple(chain.from_iterable(told))


def _renumbered(parents: Parents, nodes: Seq[int]) -> list[int]:
    places = {node: place for place, node in enumerate(nodes)} | {-1: -1}
    return [places[parents[node]] for node in nodes]
