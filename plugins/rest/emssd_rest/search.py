"""Finds the latest tokens of a row in a store, and what most often follows them there.

He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252), §3.2: the longest suffix of the context
that occurs exactly. Where REST verifies the heaviest part of the trie of what follows, this takes its heaviest chain.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt

from emssd_rest.store import END, Store

__all__ = ["StoreSearch"]

_FEW = 48  # places up to which lists are faster than arrays


class StoreSearch:
    """Searches an open store; it remembers nothing between calls."""

    def __init__(self, store: Store) -> None:
        self._tokens, self._suffixes = store.tokens, store.suffixes
        self._num_ids = store.header.num_ids
        self._width = store.tokens.itemsize
        # Python's bisection over these reads a place in a tenth of the time that arrays take.
        self._bytes = store.tokens.view(np.uint8).data
        self._order: Any = store.suffixes.data  # a sequence of integers in all that bisection needs

    def longest(self, context: Seq[int], min_match: int, max_match: int) -> tuple[int, range]:
        """How many of the latest tokens of `context` stand in the store, and the part of the suffix array where.

        Returns:
            A length of at least `min_match` and at most `max_match`, and a range that is not empty; or 0 and an empty
            range.
        """
        wanted = self._encoded(context[-max_match:])
        low, high = min_match, len(wanted) // self._width
        found, first = 0, 0
        while low <= high:  # where a suffix occurs, all shorter ones do
            length = (low + high) // 2
            gram = wanted[len(wanted) - length * self._width :]
            start = bisect_left(self._order, gram, key=self._reader(length))
            if start < len(self._order) and self._reader(length)(self._order[start]) == gram:
                found, first, low = length, start, length + 1
            else:
                high = length - 1
        if not found:
            return 0, range(0)
        gram = wanted[len(wanted) - found * self._width :]
        return found, range(first, bisect_right(self._order, gram, lo=first, key=self._reader(found)))

    def chain(self, match: int, places: range, num_tokens: int, max_matches: int) -> list[int]:
        """The most frequent tokens behind a match, one after another, each among the places that all before it fit.

        The lowest id wins a tie. The end of a document counts as a token that is never taken.

        Args:
            match, places: as `longest` gives them.
            num_tokens: the most tokens to give.
            max_matches: of more places, a sample at even distances is looked at.
        """
        behind = self._sample(places, max_matches) + match
        ids: list[int] = []
        while behind.size > _FEW and len(ids) < num_tokens:
            following = self._tokens[behind]  # in ascending order, as the suffixes are
            start, stop = _longest_run(following)
            if start == stop:
                return ids
            ids.append(int(following[start]) - 1)
            behind = behind[start:stop] + 1
        offsets = np.arange(num_tokens - len(ids))
        # Beyond the end of the last document there is nothing but its end.
        rows = self._tokens.take(behind[:, None] + offsets, mode="clip").tolist()
        for depth in range(len(offsets)):
            following = [row[depth] for row in rows]
            token = following[0] if following[0] == following[-1] else _most_frequent(following)
            if token == END:
                break
            rows = [row for row in rows if row[depth] == token]
            ids.append(token - 1)
        return ids

    def _sample(self, places: range, max_matches: int) -> npt.NDArray[Any]:
        if len(places) <= max_matches:
            return self._suffixes[places.start : places.stop]
        return self._suffixes[places.start + np.arange(max_matches) * len(places) // max_matches]

    def _encoded(self, context: Seq[int]) -> bytes:
        """The latest of these ids that the store can hold at all, as the store writes them."""
        known = len(context)
        while known and context[known - 1] < self._num_ids:
            known -= 1
        return b"".join([(token + 1).to_bytes(self._width, "big") for token in context[known:]])

    def _reader(self, length: int) -> Any:
        data, width = self._bytes, self._width
        size = length * width

        def read(place: int) -> bytes:
            return data[place * width : place * width + size].tobytes()

        return read


def _most_frequent(tokens: list[int]) -> int:
    """Of ascending `tokens`, not all alike, the most frequent one beside `END`; of equally frequent ones the lowest."""
    counts = Counter(token for token in tokens if token != END)
    return max(counts, key=counts.__getitem__)


def _longest_run(tokens: npt.NDArray[Any]) -> tuple[int, int]:
    """Where the most frequent of ascending ``tokens [m]`` stands, `END` not counted; an empty range if that is all."""
    if tokens[0] == tokens[-1]:
        return (0, 0) if tokens[0] == END else (0, len(tokens))
    bounds = np.concatenate(([0], np.flatnonzero(tokens[1:] != tokens[:-1]) + 1, [len(tokens)]))
    lengths = np.diff(bounds)
    if tokens[0] == END:
        lengths[0] = 0
    run = int(lengths.argmax())
    return int(bounds[run]), int(bounds[run + 1])
