"""Suffix decoding: what followed the end of a row's text most often, in the row itself or in outputs that are finished.

A chain's length, the match that it is made from and the growth of trees are SuffixDecoding's (Oliaro et al. 2024).
There a tree has as many tokens as the chain would have; here it is as deep, from the match that the chain is made from.
The automata, and the choice between the row's own text and other outputs, are SAM-Decoding's (Hu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from heapq import nsmallest
from typing import NamedTuple

from emssd.drafting import Draft, Drafter, Outcome, Tree, grow_tree, joined_trees
from emssd.errors import ConfigError
from emssd.sequences import Batch, Row
from emssd_suffix import SuffixConfig
from emssd_suffix.automaton import ROOT, SEPARATOR, SuffixAutomaton
from emssd_suffix.sources import Match, OutputCache

__all__ = ["SuffixDrafter"]


class Speculation(NamedTuple):
    """The chain that a match gives.

    Attributes:
        confidence: for each the frequency with which it followed the one before.
        state: of the matched string that it continues.
        limit: of tokens after that string.
    """

    tokens: list[int]
    confidence: list[float]
    state: int
    limit: int


_NOTHING = Speculation([], [], ROOT, 0)


def speculate(match: Match, config: SuffixConfig, budget: int) -> Speculation:
    """The draft with the highest score that any of the matched strings gives; the longest string wins a tie.

    From a string of ``p`` tokens, the token that followed most often is appended again and again, up to `budget` and
    ``max_spec_factor * p`` tokens, as long as the product of the frequencies is at least `min_token_prob`. The score is
    the sum of these products: how many tokens the frequencies promise (SuffixDecoding).
    """
    edges, counts, favourites = match.automaton.edges, match.automaton.counts, match.automaton.favourites
    best, best_score = _NOTHING, 0.0
    for origin, length in match.suffixes:
        limit = int(min(budget, config.max_spec_factor * length))
        if limit <= best_score or length < config.min_match_length:
            break  # no product is above 1, and all that follow are shorter
        tokens, confidence = list[int](), list[float]()
        state, product, score = origin, 1.0, 0.0
        while len(tokens) < limit and (token := favourites[state]) >= 0:
            following = edges[state][token]
            frequency = counts[following] / (counts[state] - (state in match.ends))
            product *= frequency
            if product < config.min_token_prob:
                break
            tokens.append(token)
            confidence.append(frequency)
            score += product
            state = following
        if score > best_score:
            best, best_score = Speculation(tokens, confidence, origin, limit), score
    return best


def _grown(match: Match, chain: Speculation, config: SuffixConfig, budget: int) -> Tree:
    """The tree of the likeliest tokens after the string that `chain` continues."""
    automaton, ends = match.automaton, match.ends

    def following(state: int) -> list[tuple[int, float, int]]:
        edges, counts, favourite = automaton.edges[state], automaton.counts, automaton.favourites[state]
        ranked = nsmallest(
            config.branches,
            (token for token in edges if token != SEPARATOR),
            key=lambda token: (-counts[edges[token]], token != favourite, token),
        )
        total = counts[state] - (state in ends)
        return [(token, counts[edges[token]] / total, edges[token]) for token in ranked]

    return grow_tree(
        chain.state,
        following,
        num_nodes=budget,
        depth=chain.limit,
        branches=config.branches,
        least=config.min_token_prob,
    )


class SuffixDrafter(Drafter):
    """Drafts, per row, what followed the end of its text most often before."""

    def __init__(self, config: SuffixConfig) -> None:
        _check(config)
        depth = config.max_tree_depth
        self._config = config
        self._max_match = depth - config.num_speculative_tokens
        self._rows: dict[str, SuffixAutomaton] = {}
        self._cache: OutputCache | None = None
        self.reset()
        self.num_speculative_tokens = config.branches * config.num_speculative_tokens
        self.drafts_trees = config.branches > 1

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        if not any(budget):
            return Draft.empty(len(batch))
        rows = [self._draft(row, limit) for row, limit in zip(batch, budget, strict=True)]
        return joined_trees(rows, chains=not self.drafts_trees)

    def observe(self, outcome: Outcome) -> None:
        """Remember the outputs that are finished, in row order."""
        if self._cache is not None:
            for row in outcome.batch:
                if row.finish_reason is not None:
                    self._cache.add(row.output_ids)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._rows.pop(request_id, None)
            if self._cache is not None:
                self._cache.release(request_id)

    def reset(self) -> None:
        config = self._config
        if config.cache_tokens:
            self._cache = OutputCache(config.cache_tokens, config.max_tree_depth, self._max_match)

    def _draft(self, row: Row, budget: int) -> Tree:
        """From the longest match that gives something; the row's own text has a lead."""
        config, depth = self._config, min(budget, self._config.num_speculative_tokens)
        if self.drafts_trees:
            depth = min(depth, row.num_remaining - 1)
        if depth < 1:
            return Tree([], [], [])
        for match in self._matches(row):
            chain = speculate(match, config, depth)
            if chain.tokens and self.drafts_trees:
                return _grown(match, chain, config, budget)
            if chain.tokens:
                return Tree(chain.tokens, list(range(-1, len(chain.tokens) - 1)), chain.confidence)
        return Tree([], [], [])

    def _matches(self, row: Row) -> list[Match]:
        """The places where the end of the row's text stands, in the order of preference."""
        if (automaton := self._rows.get(row.request_id)) is None:
            automaton = self._rows[row.request_id] = SuffixAutomaton(self._config.max_tree_depth)
        automaton.extend(row.tokens[automaton.num_tokens :])
        matches = [Match(automaton, *automaton.repeated(self._max_match))]
        if self._cache is None:
            return matches
        lead = matches[0].length + self._config.cache_bias
        others = sorted(self._cache.matches(row.request_id, row.tokens), key=lambda match: -match.length)
        longer = [match for match in others if match.length > lead]  # of equals, the younger generation comes first
        return [*longer, *matches, *others[len(longer) :]]


def _check(config: SuffixConfig) -> None:
    """Refuse options that do not go together."""
    depth, longest = config.max_tree_depth, config.max_tree_depth - config.num_speculative_tokens
    allowed = {
        "max_tree_depth": (longest >= 1, f"above drafter.num_speculative_tokens={config.num_speculative_tokens}"),
        "min_match_length": (
            config.min_match_length <= longest,
            f"from 1 to {longest}, drafter.max_tree_depth less drafter.num_speculative_tokens",
        ),
        "cache_tokens": (
            config.cache_tokens == 0 or config.cache_tokens >= 2 * depth,
            f"0 for no cache, or at least {2 * depth}, twice drafter.max_tree_depth",
        ),
    }
    for name, (is_allowed, range_) in allowed.items():
        if not is_allowed:
            raise ConfigError(f"drafter.{name} is {getattr(config, name)}; it must be {range_}")
