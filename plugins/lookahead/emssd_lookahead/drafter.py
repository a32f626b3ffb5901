"""Lookahead decoding: n-grams that the target wrote ahead of the text are verified where the text comes to their first
token.

Fu et al. 2024, arXiv 2402.02057, in the batch. The window of guesses and the n-grams to verify are one token tree, so a
step needs no mask of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from emssd.drafting import Draft, Drafter, Outcome
from emssd.sequences import Batch, Row
from emssd_lookahead import LookaheadConfig

__all__ = ["LookaheadDrafter"]

Tree = list[tuple[int, int]]
"""Nodes in order: token id, and index of the parent or -1."""


class NGramPool:
    """The latest n-grams of each first token, at most so many; the one that was seen longest ago goes first."""

    def __init__(self, ngram: int, most: int) -> None:
        self._ngram, self._most = ngram, most
        self._after: dict[int, list[tuple[int, ...]]] = {}

    def add(self, tokens: Seq[int]) -> None:
        """Remember an n-gram, as the latest."""
        first, rest = tokens[0], tuple(tokens[1:])
        grams = self._after.setdefault(first, [])
        if rest in grams:
            grams.remove(rest)
        grams.append(rest)
        del grams[: -self._most]

    def add_all(self, text: Seq[int]) -> None:
        """Remember every n-gram of a text."""
        for start in range(len(text) - self._ngram + 1):
            self.add(text[start : start + self._ngram])

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The n-grams after `token`, the latest first, each of ``ngram - 1`` tokens."""
        return self._after.get(token, [])[::-1]


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
        nodes = [(token, parent) for parent, token in enumerate(self._levels[0][1:], start=-1)]
        for tokens in self._levels[1:]:
            above = len(nodes) - width
            nodes += [(token, above + column) for column, token in enumerate(tokens)]
        return nodes

    def advance(self, newest: int, chosen: Seq[int]) -> list[list[int]]:
        """Move on by a place, from the `newest` token. Returns the n-gram of each column, `chosen` included.

        `chosen` ``[width]`` are the target's choices after the last token of each column.
        """
        levels = [[newest, *self._levels[0][1:]], *self._levels[1:], list(chosen)]
        self._levels = levels[1:]
        return [list(column) for column in zip(*levels, strict=True)]


@dataclass(slots=True)
class _Row:
    """The state of a row: pool and window; and of the running step its newest token and its number of guesses.

    Without a number of guesses, the window is not in the draft.
    """

    pool: NGramPool
    window: Window
    newest: int = 0
    num_guesses: int | None = None


class LookaheadDrafter(Drafter):
    """Drafts n-grams from the pool of each row, and a window that fills the pool.

    The window is part of a draft only where all of it has room: within the budget, and within what the row may still
    generate. Otherwise it stands still. It comes last, so a budget policy that finds it too dear cuts it away.
    """

    drafts_trees = True

    def __init__(self, config: LookaheadConfig) -> None:
        self.num_speculative_tokens = (config.ngram - 1) * (config.window + config.guesses) - 1
        self._config = config
        self._rows: dict[str, _Row] = {}

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        trees = list[Tree]()
        for row, limit in zip(batch, budget, strict=True):
            if not limit:
                trees.append([])
                continue
            kept = self._rows.get(row.request_id) or self._begin(row)
            kept.newest = row.tokens[-1]
            trees.append(self._tree(kept, limit, row.num_remaining - 1))
        return Draft.from_trees(trees)

    def observe(self, outcome: Outcome) -> None:
        """Fill the pools with what the target said after the windows, and move these on."""
        width, length = self._config.window, (self._config.ngram - 1) * self._config.window - 1
        for row, verified, target_ids in zip(outcome.batch, outcome.draft.lengths, outcome.target_ids, strict=True):
            kept = self._rows.get(row.request_id)
            if kept is None or kept.num_guesses is None:  # it is not drafted for, or without the window
                continue
            if verified == kept.num_guesses + length:
                behind = [target_ids[0], *target_ids[1 + kept.num_guesses :]]  # the newest token, and the window
                for gram in kept.window.advance(kept.newest, behind[-width:]):
                    kept.pool.add(gram)
            kept.num_guesses = None

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._rows.pop(request_id, None)

    def _begin(self, row: Row) -> _Row:
        config = self._config
        kept = _Row(NGramPool(config.ngram, config.guesses), Window(config.window, config.ngram - 1, list(row.tokens)))
        if config.prompt_pool:
            kept.pool.add_all(row.tokens)
        self._rows[row.request_id] = kept
        return kept

    def _tree(self, kept: _Row, limit: int, depth: int) -> Tree:
        config, window = self._config, kept.window.tree()
        has_room = len(window) <= limit and config.window + config.ngram - 3 <= depth
        tree = merged(kept.pool.after(kept.newest), limit - len(window) * has_room, depth)
        kept.num_guesses = len(tree) if has_room else None
        if kept.num_guesses is None:
            return tree
        return tree + [(token, parent + len(tree) if parent >= 0 else -1) for token, parent in window]


def merged(guesses: Iterable[Seq[int]], num_nodes: int, depth: int) -> Tree:
    """Chains as one tree, in which a common beginning stands once; at most `num_nodes` nodes, none below `depth`."""
    tree: Tree = []
    nodes: dict[tuple[int, int], int] = {}  # by parent and token
    for guess in guesses:
        at = -1
        for token in guess[:depth]:
            if (at, token) not in nodes:
                if len(tree) >= num_nodes:
                    return tree
                nodes[at, token] = len(tree)
                tree.append((token, at))
            at = nodes[at, token]
    return tree
