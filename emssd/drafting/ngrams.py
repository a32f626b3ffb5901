"""`NGramCounts`: how often each token followed each n-gram of a growing text."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

__all__ = ["NGramCounts"]

_NONE: Mapping[int, int] = {}


class NGramCounts:
    """Counts what follows the n-grams of one text.

    Args:
        max_size: the longest n-grams that are counted, in tokens; at least 1.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size, self._num_read = max_size, 1
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}

    def extend(self, tokens: Seq[int]) -> None:
        """Count what is new in `tokens`, which begin with those of the call before."""
        for place in range(self._num_read, len(tokens)):
            token = tokens[place]
            for size in range(1, min(self._max_size, place) + 1):
                following = self._counts.setdefault(tuple(tokens[place - size : place]), {})
                following[token] = following.pop(token, 0) + 1  # the latest stands last
        self._num_read = max(self._num_read, len(tokens))

    def after(self, tokens: Seq[int], min_size: int = 1) -> Mapping[int, int]:
        """The counts of the tokens behind the longest known n-gram that ends `tokens`, the latest last.

        Empty where none of at least `min_size` tokens was.
        """
        for size in range(min(self._max_size, len(tokens)), min_size - 1, -1):
            if found := self._counts.get(tuple(tokens[-size:])):
                return found
        return _NONE
