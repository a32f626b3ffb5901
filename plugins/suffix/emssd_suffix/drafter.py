"""Suffix decoding: what followed the end of a row's text most often, in the row itself or in outputs that are finished.

The length of a draft and which match it is made from are those of SuffixDecoding (Oliaro et al. 2024), here for chains;
the automata and the choice between the row's own text and that of others are SAM-Decoding's (Hu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd.drafting import Draft, Drafter, Outcome
from emssd.errors import ConfigError
from emssd.sequences import Batch, Sequence
from emssd_suffix import SuffixConfig
from emssd_suffix.automaton import SuffixAutomaton
from emssd_suffix.sources import Match, OutputCache

__all__ = ["SuffixDrafter", "speculate"]


def speculate(match: Match, config: SuffixConfig, budget: int) -> list[int]:
    """The draft with the highest score that any of the matched strings gives; the longest string wins a tie.

    From a string of ``p`` tokens, the token that followed most often is appended again and again, up to `budget` and
    ``max_spec_factor * p`` tokens, as long as the product of the frequencies is at least `min_token_prob`. The score is
    the sum of these products: how many tokens the frequencies promise (SuffixDecoding).
    """
    edges, counts, favourites = match.automaton.edges, match.automaton.counts, match.automaton.favourites
    chosen: list[int] = []
    best_score = 0.0
    for state, length in match.suffixes:
        limit = int(min(budget, config.max_spec_factor * length))
        if limit <= best_score or length < config.min_match_length:
            break  # no product is above 1, and all that follow are shorter
        tokens: list[int] = []
        product, score = 1.0, 0.0
        while len(tokens) < limit and (token := favourites[state]) >= 0:
            following = edges[state][token]
            product *= counts[following] / (counts[state] - (state in match.ends))
            if product < config.min_token_prob:
                break
            tokens.append(token)
            score += product
            state = following
        if score > best_score:
            chosen, best_score = tokens, score
    return chosen


class SuffixDrafter(Drafter):
    """Drafts, per row, what followed the end of its text most often before.

    Args:
        config: see `SuffixConfig`.

    Raises:
        ConfigError: an option out of its range.
    """

    def __init__(self, config: SuffixConfig) -> None:
        _check(config)
        depth = config.max_tree_depth
        self._config = config
        self._max_match = depth - config.num_speculative_tokens
        self._rows: dict[str, SuffixAutomaton] = {}
        self._cache: OutputCache | None = None
        self.reset()
        self.num_speculative_tokens = config.num_speculative_tokens

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        chains = list[list[int]]()
        for row, limit in zip(batch, budget, strict=True):
            chains.append(self._draft(row, min(limit, self.num_speculative_tokens)) if limit else [])
        return Draft.from_chains(chains)

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

    def _draft(self, row: Sequence, limit: int) -> list[int]:
        """From the longest match that gives something; the row's own text has a lead."""
        own = self._rows.get(row.request_id)
        if own is None:
            own = self._rows[row.request_id] = SuffixAutomaton(self._config.max_tree_depth)
        own.extend(row.tokens[own.num_tokens :])
        matches = [Match(own, *own.repeated(self._max_match))]
        if self._cache is not None:
            lead = matches[0].length + self._config.cache_bias
            others = self._cache.matches(row.request_id, row.tokens)
            longer = [match for match in others if match.length > lead]
            matches = [*_longest_first(longer), *matches, *_longest_first(m for m in others if m.length <= lead)]
        for match in matches:
            if chain := speculate(match, self._config, limit):
                return chain
        return []


def _longest_first(matches: Iterable[Match]) -> list[Match]:
    return sorted(matches, key=lambda match: -match.length)  # of equals, the younger generation comes first


def _check(config: SuffixConfig) -> None:
    """Refuse options out of their ranges.

    Raises:
        ConfigError: says which option, and what it may be.
    """
    depth, longest = config.max_tree_depth, config.max_tree_depth - config.num_speculative_tokens
    allowed = {
        "num_speculative_tokens": (config.num_speculative_tokens >= 1, "at least 1"),
        "max_tree_depth": (longest >= 1, f"above drafter.num_speculative_tokens={config.num_speculative_tokens}"),
        "max_spec_factor": (config.max_spec_factor > 0, "above 0"),
        "min_token_prob": (0 <= config.min_token_prob <= 1, "from 0 to 1"),
        "min_match_length": (
            1 <= config.min_match_length <= longest,
            f"from 1 to {longest}, drafter.max_tree_depth less drafter.num_speculative_tokens",
        ),
        "cache_tokens": (
            config.cache_tokens == 0 or config.cache_tokens >= 2 * depth,
            f"0 for no cache, or at least {2 * depth}, twice drafter.max_tree_depth",
        ),
        "cache_bias": (config.cache_bias >= 0, "at least 0"),
    }
    for name, (is_allowed, range_) in allowed.items():
        if not is_allowed:
            raise ConfigError(f"drafter.{name} is {getattr(config, name)}; it must be {range_}")
