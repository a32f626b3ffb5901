"""A suffix automaton that grows token by token and counts: how often each string of the text occurs, and what follows.

Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text". A state stands for all strings that end
at the same places of the text; its link leads to the state of their longest suffix that ends at other places too.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ROOT", "SEPARATOR", "SuffixAutomaton"]

ROOT = 0  # the state of the empty string
SEPARATOR = -1  # stands after each of several texts in one automaton; it is no token, and never a favourite
_NONE = -1


class SuffixAutomaton:
    """The strings of a growing text, those of up to `max_depth` tokens with their frequencies.

    A token is appended in amortised constant time: at most two states are added, and the counts of at most `max_depth`
    strings rise.

    Args:
        max_depth: the longest strings that are counted; at least 2.

    Attributes:
        edges: of each state, the state that each token leads to.
        links: of each state its link, -1 for `ROOT`.
        lengths: of each state the length of its longest string.
        counts: of each state how often its strings occur, if the shortest of them has up to `max_depth` tokens.
        favourites: of each state the token that followed its strings most often, of equals the latest, -1 for none;
            if the shortest of them has fewer than `max_depth` tokens.
    """

    def __init__(self, max_depth: int) -> None:
        self.edges: list[dict[int, int]] = [{}]
        self.links = [_NONE]
        self.lengths = [0]
        self.counts = [0]
        self.favourites = [_NONE]
        self.num_tokens = 0
        self._last = ROOT  # the state of the whole text
        self._max_size = max_depth - 1
        self._context, self._size = ROOT, 0  # the state of its last `_size` tokens, which are at most `_max_size`

    def extend(self, tokens: Iterable[int]) -> None:
        """Append `tokens`."""
        edges, links, lengths = self.edges, self.links, self.lengths
        for token in tokens:
            state, before = len(links), self._last
            edges.append({})
            lengths.append(lengths[before] + 1)
            links.append(ROOT)
            self.counts.append(0)
            self.favourites.append(_NONE)
            self._last = state
            while before >= 0 and token not in edges[before]:
                edges[before][token] = state
                before = links[before]
            if before >= 0:
                links[state] = older = edges[before][token]
                if lengths[older] > lengths[before] + 1:  # its shorter strings end here too, its longer ones do not
                    links[state] = self._split(older, before, token)
                    self._context = self.shortened(self._context, self._size)
            self._count(token)
            self._context = edges[self._context][token]
            if self._size < self._max_size:
                self._size += 1
            else:
                self._context = self.shortened(self._context, self._size)
        self.num_tokens = lengths[self._last]

    def shortened(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of the strings of `state`, which are that long at least."""
        links, lengths = self.links, self.lengths
        while state and lengths[links[state]] >= length:
            state = links[state]
        return state

    def chain(self, state: int, length: int) -> list[tuple[int, int]]:
        """State and length of the string of `length` tokens in `state`, and of its suffixes that end at more places."""
        suffixes = []
        while state:
            suffixes.append((state, length))
            state = self.links[state]
            length = self.lengths[state]
        return suffixes

    def repeated(self, max_length: int) -> tuple[list[tuple[int, int]], set[int]]:
        """The ends of the text that occur elsewhere too, and where nothing follows.

        The former are state and length of the longest end up to `max_length`, and of its suffixes that occur at more
        places; the latter the states of all ends of the text, as long as favourites are known for them.
        """
        links, lengths, counts = self.links, self.lengths, self.counts
        elsewhere, ends = list[tuple[int, int]](), set[int]()
        state, length = self._context, self._size
        while state:
            ends.add(state)
            shorter = links[state]
            if counts[state] > 1 and lengths[shorter] < max_length:
                elsewhere.append((state, min(length, max_length)))
            state, length = shorter, lengths[shorter]
        return elsewhere, ends

    def _split(self, older: int, before: int, token: int) -> int:
        """Give the strings of `older` that end in those of `before` and `token` a state of their own."""
        edges, links = self.edges, self.links
        split = len(links)
        edges.append(edges[older].copy())
        links.append(links[older])
        self.lengths.append(self.lengths[before] + 1)
        self.counts.append(self.counts[older])
        self.favourites.append(self.favourites[older])
        links[older] = split
        while before >= 0 and edges[before].get(token) == older:
            edges[before][token] = split
            before = links[before]
        return split

    def _count(self, token: int) -> None:
        """Count every string that ends in `token`, the last of the text, and what it follows."""
        edges, links, counts, favourites = self.edges, self.links, self.counts, self.favourites
        before, counted = self._context, _NONE
        while before >= 0:
            state = edges[before][token]
            if state != counted:  # several strings, one state
                counts[state] += 1
                counted = state
            best = favourites[before]
            if best != token and token >= 0 and (best < 0 or counts[state] >= counts[edges[before][best]]):
                favourites[before] = token
            before = links[before]
