"""What a drafter proposes (`Draft`) and what it hears back (`Outcome`)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from emssd.attention.transfer import on_device

if TYPE_CHECKING:
    from emssd.sequences import Batch

__all__ = ["Draft", "Outcome"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens of a whole batch: one token tree per row, ragged, a chain being the special case.

    Row ``i`` holds nodes ``indptr[i]:indptr[i + 1]``.

    Attributes:
        token_ids: ``[num_draft]`` int64, on any device.
        indptr: ``[B + 1]`` host integers with a leading zero.
        parents: ``[num_draft]`` host integers, for each node the index *within its row* of its parent, ``-1`` for
            a child of the sequence's newest token; a parent comes before its children. ``None``: every row is a
            chain.
    """

    token_ids: torch.Tensor
    indptr: tuple[int, ...]
    parents: tuple[int, ...] | None = None

    @classmethod
    def from_chains(cls, chains: Iterable[Seq[int]]) -> Draft:
        """A draft of one chain of token ids per row; an empty chain drafts nothing."""
        token_ids: list[int] = []
        indptr = [0]
        for chain in chains:
            token_ids.extend(chain)
            indptr.append(len(token_ids))
        return cls(torch.tensor(token_ids, dtype=torch.int64), tuple(indptr))

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
        return [stop - start for start, stop in zip(self.indptr, self.indptr[1:], strict=False)]

    def cut(self, lengths: Seq[int]) -> Draft:
        """The first `lengths` tokens of each row's chain, ``[B]``."""
        if list(lengths) == self.lengths:
            return self
        kept = [range(start, start + length) for start, length in zip(self.indptr, lengths, strict=False)]
        nodes = on_device([node for row in kept for node in row], self.token_ids.device)
        return Draft(self.token_ids[nodes], (0, *accumulate(lengths)))

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
        if self.parents is None:
            return True
        lengths = self.lengths
        return self.parents == tuple(node - 1 for length in lengths for node in range(length))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a draft; the batch has already been extended when a drafter receives it.

    Attributes:
        batch: the batch that was drafted for, finished rows included.
        draft: what was verified: the beginning of each row's draft, as long as the budget policy decided.
        accepted: per row the accepted nodes of its draft, as indices within the row, in order; for a chain
            ``range(n)``. What an EOS or a length limit later cut off the sequence is not taken out here.
    """

    batch: Batch
    draft: Draft
    accepted: tuple[Seq[int], ...]
