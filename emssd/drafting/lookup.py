"""Lookup in a row's own text: `LookupDrafter` copies what followed an earlier place of the row's latest tokens."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from enum import Enum

from emssd.drafting.draft import Draft
from emssd.drafting.drafter import Drafter
from emssd.sequences import Batch, Sequence

__all__ = ["LookupDrafter", "NGramIndex", "Occurrence"]


class Occurrence(str, Enum):
    """Which of several matches is copied from."""

    first = "first"
    last = "last"


class NGramIndex:
    """Finds the n-grams of a growing text that have enough tokens behind them.

    Args:
        size: n.
        num_behind: how many tokens must follow an n-gram before it counts.
        occurrence: which place of an n-gram is found, if it has several.
    """

    def __init__(self, size: int, num_behind: int, occurrence: Occurrence) -> None:
        self._size, self._num_behind = size, num_behind
        self._keep_first = occurrence == Occurrence.first
        self._behind: dict[tuple[int, ...], int] = {}  # index of the token behind each n-gram
        self._next = size  # where the next n-gram to enter ends

    def extend(self, tokens: Seq[int], end: int) -> None:
        """Index what is new in ``tokens[:end]``; the text of the call before is its beginning.

        Each n-gram is read once in a sequence's life: when enough tokens follow it.
        """
        stop = max(self._next, end - self._num_behind + 1)
        for place in range(self._next, stop):
            gram = tuple(tokens[place - self._size : place])
            if not (self._keep_first and gram in self._behind):
                self._behind[gram] = place
        self._next = stop

    def find(self, tokens: Seq[int]) -> int | None:
        """Index of the token behind the chosen place of the n-gram that `tokens` ends with, or ``None``."""
        return self._behind.get(tuple(tokens[-self._size :]))


class LookupDrafter(Drafter):
    """Drafts, per row, what followed the row's latest n-gram at an earlier place in its own text.

    The text is indexed as it grows, which finds what a search of the whole text would find in every step.

    Args:
        num_behind: maps each size n, in the order in which they are tried, to the number of tokens that must follow an
            n-gram before it counts.
        num_speculative_tokens: the most tokens to copy.
        occurrence: which place of an n-gram is copied from, if it has several.
        prompt_only: whether matches and copies come from the prompt alone, or from prompt and output.
    """

    def __init__(
        self,
        num_behind: dict[int, int],
        num_speculative_tokens: int,
        occurrence: Occurrence,
        prompt_only: bool = False,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._num_behind, self._occurrence, self._prompt_only = num_behind, occurrence, prompt_only
        self._indexes: dict[str, list[NGramIndex]] = {}

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.from_chains(self._copy(row, limit) for row, limit in zip(batch, budget, strict=True))

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._indexes.pop(request_id, None)

    def _copy(self, row: Sequence, budget: int) -> Seq[int]:
        if budget == 0:
            return ()
        tokens = row.tokens
        end = len(row.request.prompt_ids) if self._prompt_only else len(tokens)
        indexes = self._indexes.get(row.request_id)
        if indexes is None:
            indexes = self._indexes[row.request_id] = [
                NGramIndex(size, num_behind, self._occurrence) for size, num_behind in self._num_behind.items()
            ]
        for index in indexes:
            index.extend(tokens, end)
        for index in indexes:
            place = index.find(tokens)
            if place is not None:
                return tokens[place : min(place + self.num_speculative_tokens, place + budget, end)]
        return ()
