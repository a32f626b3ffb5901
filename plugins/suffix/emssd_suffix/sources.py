"""The texts that a row's drafts are made from: its own, or remembered outputs of others, matched with the row's end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from collections.abc import Set
from typing import NamedTuple

from emssd_suffix.automaton import ROOT, SEPARATOR, SuffixAutomaton

__all__ = ["Match", "OutputCache"]


class Match(NamedTuple):
    """The end of a row's text, found elsewhere.

    Attributes:
        suffixes: state and length of the longest string found, and of its suffixes that are found at more places.
        ends: states of strings that the text of the automaton ends in, where nothing follows.
    """

    automaton: SuffixAutomaton
    suffixes: list[tuple[int, int]]
    ends: Set[int] = frozenset()

    @property
    def length(self) -> int:
        """Tokens of the longest string found, 0 if there is none."""
        return self.suffixes[0][1] if self.suffixes else 0


class Matcher:
    """The longest end of one row's text that an automaton of other texts, which may grow, holds; token by token."""

    def __init__(self, automaton: SuffixAutomaton, max_length: int) -> None:
        self.automaton = automaton
        self._max_length = max_length
        self._state, self._length = ROOT, 0
        self._num_read = 0  # tokens of the row
        self._num_known = automaton.num_tokens

    def match(self, tokens: Seq[int]) -> Match:
        """The match of the end of `tokens`, which go on from the `tokens` of the call before."""
        automaton = self.automaton
        start = max(0, len(tokens) - self._max_length)
        if self._num_known < automaton.num_tokens:
            self._num_known = automaton.num_tokens
            self._state = automaton.shortened(self._state, self._length)  # which may have been split
            if self._is_longer_now(tokens):
                self._num_read = -1
        if self._num_read < start:
            self._state, self._length, self._num_read = ROOT, 0, start  # of more tokens, none could be in the match
        for token in tokens[self._num_read :]:
            self._step(token)
        self._num_read = len(tokens)
        return Match(automaton, automaton.chain(self._state, self._length))

    def _is_longer_now(self, tokens: Seq[int]) -> bool:
        """Whether the automaton has come to hold the match with one more of the row's tokens in front."""
        start = self._num_read - self._length - 1
        if start < 0 or self._length == self._max_length:
            return False
        state = ROOT
        for token in tokens[start : self._num_read]:
            state = self.automaton.edges[state].get(token, ROOT)
            if not state:
                return False
        return True

    def _step(self, token: int) -> None:
        automaton, state = self.automaton, self._state
        while state and token not in automaton.edges[state]:
            state = automaton.links[state]
            self._length = automaton.lengths[state]
        state = automaton.edges[state].get(token, ROOT)
        self._length = min(self._length + 1, self._max_length) if state else 0
        self._state = automaton.shortened(state, self._length)


class OutputCache:
    """Outputs of finished requests, in two generations: when the younger is full, the older is forgotten.

    What it holds depends on the outputs and on their order, and on nothing else.

    Args:
        max_tokens: of both together, one for the end of each output included; at least 4.
    """

    def __init__(self, max_tokens: int, max_depth: int, max_length: int) -> None:
        self._max_tokens = max_tokens // 2
        self._max_depth, self._max_length = max_depth, max_length
        # The younger first, each with the matchers of the rows that run; with it they are forgotten.
        self._generations: deque[tuple[SuffixAutomaton, dict[str, Matcher]]] = deque(maxlen=2)

    def add(self, output: Seq[int]) -> None:
        """Remember `output`, or the end of one that is longer than a generation."""
        text = [*output[1 - self._max_tokens :], SEPARATOR]
        if not self._generations or self._generations[0][0].num_tokens + len(text) > self._max_tokens:
            self._generations.appendleft((SuffixAutomaton(self._max_depth), {}))
        self._generations[0][0].extend(text)

    def matches(self, request_id: str, tokens: Seq[int]) -> list[Match]:
        """The end of a row's text in each generation."""
        matches = []
        for automaton, matchers in self._generations:
            if request_id not in matchers:
                matchers[request_id] = Matcher(automaton, self._max_length)
            matches.append(matchers[request_id].match(tokens))
        return matches

    def release(self, request_id: str) -> None:
        """Forget how a row that runs no longer is matched; what it put in stays."""
        for _, matchers in self._generations:
            matchers.pop(request_id, None)
