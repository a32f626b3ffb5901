"""Finds the latest tokens of a row in a store, and what most often follows them there.

He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252), §3.2: the longest suffix of the context
that occurs exactly; and §3.3: the most frequent prefixes of the trie of what follows, or its heaviest chain alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from emssd.drafting import Tree, grow_tree
from emssd_rest.store import END, Store

__all__ = ["StoreSearch"]

_FEW = 48  # places up to which lists are faster than arrays
_Texts: TypeAlias = npt.NDArray[Any] | tuple[list[list[int]], int]
"""Many places, or what stands at a few, and how much of it has been read."""


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
        """The longest suffix of `context` in the store, and its part of the suffix array, which is not empty.

        It is at least `min_match` and at most `max_match` long; or 0, with an empty range.
        """
        wanted = self._encoded(context[-max_match:])
        low, high = min_match, len(wanted) // self._width
        longest, first = 0, 0
        while low <= high:  # where a suffix occurs, all shorter ones do
            length = (low + high) // 2
            gram = wanted[len(wanted) - length * self._width :]
            start = bisect_left(self._order, gram, key=self._reader(length))
            if start < len(self._order) and self._reader(length)(self._order[start]) == gram:
                longest, first, low = length, start, length + 1
            else:
                high = length - 1
        if not longest:
            return 0, range(0)
        gram = wanted[len(wanted) - longest * self._width :]
        return longest, range(first, bisect_right(self._order, gram, lo=first, key=self._reader(longest)))

    def behind(self, match: int, places: range, max_matches: int) -> npt.NDArray[Any]:
        """``[m]`` the places after a match of `longest`, in the order of the texts there.

        If there are more than `max_matches`, a sample at even distances is looked at.
        """
        some = self._suffixes[places.start : places.stop]
        if len(places) > max_matches:
            some = some[np.arange(max_matches) * len(places) // max_matches]
        return some + match

    def tree(self, behind: npt.NDArray[Any], depth: int, num_nodes: int, branches: int) -> Tree:
        """The most frequent continuations, best first; see `emssd.drafting.growth.grow_tree`. One branch is a chain.

        The share of a node is that of the places that fit its parent. The lowest id wins a tie. The end of a document
        counts as a token that is never taken.
        """

        def following(texts: _Texts) -> list[tuple[int, float, _Texts]]:
            if isinstance(texts, np.ndarray):
                if len(texts) > _FEW:
                    return _runs(self._tokens[texts], texts, branches)
                texts = self._texts(texts, depth), 0
            rows, column = texts
            if (token := rows[0][column]) == rows[-1][column]:
                return [] if token == END else [(token - 1, 1.0, (rows, column + 1))]
            shared = [(token, list(group)) for token, group in groupby(rows, itemgetter(column)) if token != END]
            shared.sort(key=lambda pair: -len(pair[1]))
            return [(token - 1, len(some) / len(rows), (some, column + 1)) for token, some in shared[:branches]]

        origin: _Texts = behind
        return grow_tree(origin, following, num_nodes=num_nodes, depth=depth, branches=branches)

    def _texts(self, places: npt.NDArray[Any], num_tokens: int) -> list[list[int]]:
        """The tokens from a few `places` on; after the last document, all are `END`."""
        rows: list[list[int]] = self._tokens.take(places[:, None] + np.arange(num_tokens), mode="clip").tolist()
        return rows

    def _encoded(self, context: Seq[int]) -> bytes:
        """The latest of these ids that the store can hold at all, as the store writes them."""
        start = len(context)
        while start and context[start - 1] < self._num_ids:
            start -= 1
        return b"".join([(token + 1).to_bytes(self._width, "big") for token in context[start:]])

    def _reader(self, length: int) -> Any:
        data, width = self._bytes, self._width
        size = length * width

        def read(start: int) -> bytes:
            return data[start * width : start * width + size].tobytes()

        return read


def _runs(tokens: npt.NDArray[Any], places: npt.NDArray[Any], most: int) -> list[tuple[int, float, _Texts]]:
    """The `most` most frequent of ascending ``tokens [m]``, `END` left out; the lowest wins a tie. Each has its
    id, its share, and the places after its `places`.
    """
    bounds = np.concatenate(([0], np.flatnonzero(tokens[1:] != tokens[:-1]) + 1, [len(tokens)]))
    order = np.argsort(-np.diff(bounds), kind="stable")
    kept = [run for run in order[: most + 1].tolist() if tokens[bounds[run]] != END][:most]
    spans = [(int(bounds[run]), int(bounds[run + 1])) for run in kept]
    return [(int(tokens[start]) - 1, (stop - start) / len(tokens), places[start:stop] + 1) for start, stop in spans]
