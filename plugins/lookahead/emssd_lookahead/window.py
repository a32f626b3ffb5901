"""The state of a row in lookahead decoding: the window of guesses ahead, and the pool of n-grams from it."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

__all__ = ["NGramPool", "Window"]


class NGramPool:
    """The latest n-grams of each first token.

    Args:
        ngram: their length, the first token included.
        most: how many are kept for a first token; the one that was seen longest ago goes first.
    """

    def __init__(self, ngram: int, most: int) -> None:
        self._ngram, self._most = ngram, most
        self._behind: dict[int, list[tuple[int, ...]]] = {}

    def add(self, tokens: Seq[int]) -> None:
        """Remember an n-gram, as the latest."""
        first, rest = tokens[0], tuple(tokens[1:])
        known = self._behind.setdefault(first, [])
        if rest in known:
            known.remove(rest)
        known.append(rest)
        del known[: -self._most]

    def add_all(self, text: Seq[int]) -> None:
        """Remember every n-gram of a text."""
        for start in range(len(text) - self._ngram + 1):
            self.add(text[start : start + self._ngram])

    def behind(self, token: int) -> list[tuple[int, ...]]:
        """The n-grams after `token`, the latest first, each of ``ngram - 1`` tokens."""
        return self._behind.get(token, [])[::-1]


class Window:
    """Guesses at the next `width` places, refined at every step: a two-dimensional Jacobi iteration.

    Column ``c`` begins with the guess at place ``c``; the newest token of the row is place 0. Each further token is
    what the target said after the one above, a step later. So a column is a piece of text that may yet come.

    Args:
        levels: ``N - 1`` tokens of each column.
        text: at the beginning all tokens are drawn from this text.
    """

    def __init__(self, width: int, levels: int, text: Seq[int]) -> None:
        draw = random.Random(len(text))
        self._levels = [[draw.choice(text) for _ in range(width)] for _ in range(levels)]

    def tree(self) -> list[tuple[int, int]]:
        """The window as a tree after the newest token: token ids and parents, level by level.

        The first level is a chain from the newest token on. Below it, each token is the child of the one above.
        """
        width = len(self._levels[0])
        nodes = [(token, place - 1) for place, token in enumerate(self._levels[0][1:])]
        for tokens in self._levels[1:]:
            above = len(nodes) - width
            nodes += [(token, above + column) for column, token in enumerate(tokens)]
        return nodes

    def advance(self, newest: int, said: Seq[int]) -> list[list[int]]:
        """Move on by a place.

        Args:
            newest: the token that the window stood after.
            said: ``[width]`` what the target said after the last token of each column.

        Returns:
            The n-gram of each column, `said` included.
        """
        levels = [[newest, *self._levels[0][1:]], *self._levels[1:], list(said)]
        self._levels = levels[1:]
        return [list(column) for column in zip(*levels, strict=True)]
