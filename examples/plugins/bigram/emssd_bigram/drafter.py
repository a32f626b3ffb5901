"""Drafts what most often followed each token in the same text, token after token."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from emssd.drafting import Draft, Drafter
from emssd.sequences import Batch

from emssd_bigram import BigramConfig

__all__ = ["BigramDrafter"]


class _Followers:
    """The counts of each token after each other one in a text. A step counts what is new, and reads nothing again."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._num_read = 0

    def read(self, tokens: Sequence[int]) -> None:
        for token, follower in pairwise(tokens[max(self._num_read - 1, 0) :]):
            self._counts[token][follower] += 1
        self._num_read = len(tokens)

    def walk(self, token: int, limit: int, min_count: int) -> list[int]:
        """From `token` on always the most frequent follower, the earliest of equals, as long as it was seen enough."""
        chain: list[int] = []
        while len(chain) < limit and token in self._counts:
            token, count = self._counts[token].most_common(1)[0]
            if count < min_count:
                break
            chain.append(token)
        return chain


class BigramDrafter(Drafter):
    """Drafts, for each row, along the most frequent pairs of tokens of its own text.

    Args:
        config: see `BigramConfig`.
    """

    def __init__(self, config: BigramConfig) -> None:
        self.num_speculative_tokens = config.length
        self._min_count = config.min_count
        self._followers: dict[str, _Followers] = {}

    def propose(self, batch: Batch, budget: Sequence[int]) -> Draft:
        chains = []
        for row, limit in zip(batch, budget, strict=True):
            followers = self._followers.setdefault(row.request_id, _Followers())
            followers.read(row.tokens)
            chains.append(followers.walk(row.tokens[-1], limit, self._min_count))
        return Draft.from_chains(chains)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._followers.pop(request_id, None)
