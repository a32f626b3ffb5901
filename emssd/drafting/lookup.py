"""Lookup in a row's own text: `LookupDrafter` copies what followed an earlier occurrence of the latest tokens."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from enum import Enum

from emssd.drafting.draft import Draft, joined_trees
from emssd.drafting.drafter import Drafter
from emssd.drafting.growth import Tree, grow_tree
from emssd.sequences import Batch, Row


class Occurrence(str, Enum):
    """The one of several matches that is copied from."""

    first = "first"
    last = "last"


class NGramIndex:
    """Finds the n-grams of a growing text that have enough tokens after them.

    Args:
        num_behind: how many tokens must follow an n-gram before it counts.
    """

    def __init__(self, size: int, num_behind: int, occurrence: Occurrence, num_copies: int = 1) -> None:
        self._size, self._num_behind, self._num_copies = size, num_behind, num_copies
        self._keep_first = occurrence == Occurrence.first
        self._following: dict[tuple[int, ...], list[int]] = {}  # indices of the tokens after each n-gram
        self._next = size  # where the next n-gram to enter ends

    def extend(self, tokens: Seq[int], end: int) -> None:
        """Index what is new in ``tokens[:end]``; the text of the call before is its beginning.

        Each n-gram is read once in a sequence's life: when enough tokens follow it.
        """
        stop = max(self._next, end - self._num_behind + 1)
        for index in range(self._next, stop):
            following = self._following.setdefault(tuple(tokens[index - self._size : index]), [])
            if not self._keep_first:
                following.insert(0, index)
                del following[self._num_copies :]
            elif len(following) < self._num_copies:
                following.append(index)
        self._next = stop

    def find(self, tokens: Seq[int]) -> Seq[int]:
        """Indices of the tokens after the n-gram that `tokens` ends with, in the order of choice."""
        return self._following.get(tuple(tokens[-self._size :]), ())


class LookupDrafter(Drafter):
    """Drafts, per row, the tokens that followed earlier occurrences of the row's latest n-gram in its own text.

    The text is indexed as it grows, which finds the same as a search of the whole text in every step.

    Args:
        num_behind: maps each size n, in the order in which they are tried, to the number of tokens that must follow an
            n-gram before it counts.
        num_speculative_tokens: the most tokens of one copy.
        occurrence: the one that is copied, if an n-gram has several.
        prompt_only: whether matches and copies come from the prompt alone, or from prompt and output.
        branches: how many occurrences to copy. Several copies make one tree, where tokens that more of them have come
            first; the confidence is their share.
    """

    def __init__(
        self,
        num_behind: dict[int, int],
        num_speculative_tokens: int,
        occurrence: Occurrence,
        prompt_only: bool = False,
        branches: int = 1,
    ) -> None:
        self.num_speculative_tokens = branches * num_speculative_tokens
        self.drafts_trees = branches > 1
        self._copy_length, self._branches = num_speculative_tokens, branches
        self._num_behind, self._occurrence, self._prompt_only = num_behind, occurrence, prompt_only
        self._indexes: dict[str, list[NGramIndex]] = {}

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        pairs = zip(batch, budget, strict=True)
        if self.drafts_trees:
            return joined_trees(self._tree(row, limit) for row, limit in pairs)
        return Draft.from_chains(self._copy(row, limit) for row, limit in pairs)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._indexes.pop(request_id, None)

    def _copy(self, row: Row, budget: int) -> Seq[int]:
        starts, end = self._starts(row) if budget else ((), 0)
        return row.tokens[starts[0] : min(starts[0] + min(self._copy_length, budget), end)] if starts else ()

    def _tree(self, row: Row, budget: int) -> Tree:
        depth = min(self._copy_length, row.num_remaining - 1)
        if min(budget, depth) < 1:
            return Tree([], [], [])
        tokens, (starts, end) = row.tokens, self._starts(row)

        def following(indices: Seq[int]) -> list[tuple[int, float, Seq[int]]]:
            nexts: dict[int, list[int]] = {}
            for index in indices:
                if index < end:
                    nexts.setdefault(tokens[index], []).append(index + 1)
            ranked = sorted(nexts.items(), key=lambda item: -len(item[1]))  # of equals, the preferred copy first
            return [(token, len(some) / len(indices), some) for token, some in ranked]

        return grow_tree(starts, following, num_nodes=budget, depth=depth, branches=self._branches)

    def _starts(self, row: Row) -> tuple[Seq[int], int]:
        """The indices where copies of the row's text begin, and the end of the text that is searched."""
        tokens, end = row.tokens, len(row.request.prompt_ids) if self._prompt_only else len(row.tokens)
        indexes = self._indexes.get(row.request_id)
        if indexes is None:
            indexes = self._indexes[row.request_id] = [
                NGramIndex(size, num_behind, self._occurrence, self._branches)
                for size, num_behind in self._num_behind.items()
            ]
        for index in indexes:
            index.extend(tokens, end)
        return next((starts for index in indexes if (starts := index.find(tokens))), ()), end
