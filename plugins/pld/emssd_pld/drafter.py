"""Prompt lookup decoding: the row's latest n-gram is looked up in its own text, the longest n first.

Saxena 2023, "Prompt Lookup Decoding". The published function compares the n-gram with all windows of the text in every
step; the index here has visited each of them once, and gives the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd.drafting import Draft, Drafter
from emssd.errors import ConfigError
from emssd.sequences import Batch, Sequence
from emssd_pld import Occurrence, PLDConfig

__all__ = ["NGramIndex", "PLDDrafter"]


class NGramIndex:
    """Where each n-gram of a growing text is followed by something to copy, for all sizes n.

    Args:
        config: see `PLDConfig`.
    """

    def __init__(self, config: PLDConfig) -> None:
        sizes, copied = range(config.max_ngram_size, config.min_ngram_size - 1, -1), config.num_speculative_tokens
        self._keep_first = config.occurrence == Occurrence.first
        # Of each size: the size, how many tokens must follow, and the index of the token behind each n-gram.
        self._tables: list[tuple[int, int, dict[tuple[int, ...], int]]] = [
            (size, max(copied, size + 1) if config.require_full_copy else 1, {}) for size in sizes
        ]
        self._num_seen = 0  # tokens

    def extend(self, tokens: Seq[int]) -> None:
        """Index what is new in `tokens`; they begin with those of the call before.

        Of each size, every n-gram enters once in a sequence's life: when enough tokens follow it.
        """
        num_seen, num_tokens = self._num_seen, len(tokens)
        for size, needed, behind in self._tables:
            for place in range(max(size, num_seen - needed + 1), num_tokens - needed + 1):
                gram = tuple(tokens[place - size : place])
                if not (self._keep_first and gram in behind):
                    behind[gram] = place
        self._num_seen = num_tokens

    def find(self, tokens: Seq[int]) -> int | None:
        """Index of the token behind the chosen occurrence of the longest n-gram at the end of `tokens`, or ``None``."""
        for size, _, behind in self._tables:
            place = behind.get(tuple(tokens[-size:]))
            if place is not None:
                return place
        return None


class PLDDrafter(Drafter):
    """Drafts, per row, what followed the row's latest tokens at an earlier place of its prompt and output.

    Args:
        config: see `PLDConfig`.

    Raises:
        ConfigError: a size below one, sizes in the wrong order, or a choice that does not exist.
    """

    def __init__(self, config: PLDConfig) -> None:
        if not 1 <= config.min_ngram_size <= config.max_ngram_size or config.num_speculative_tokens < 1:
            raise ConfigError(
                f"drafter.min_ngram_size is {config.min_ngram_size}, drafter.max_ngram_size is "
                f"{config.max_ngram_size} and drafter.num_speculative_tokens is {config.num_speculative_tokens}; "
                f"all must be at least 1, and the second at least the first"
            )
        if config.occurrence not in set(Occurrence):
            raise ConfigError(f"drafter.occurrence is {config.occurrence!r}; choose {' or '.join(Occurrence)}")
        self._config = config
        self._indexes: dict[str, NGramIndex] = {}
        self.num_speculative_tokens = config.num_speculative_tokens

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.from_chains(self._copy(row, limit) for row, limit in zip(batch, budget, strict=True))

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._indexes.pop(request_id, None)

    def _copy(self, row: Sequence, budget: int) -> list[int]:
        if budget == 0:
            return []
        index = self._indexes.get(row.request_id)
        if index is None:
            index = self._indexes[row.request_id] = NGramIndex(self._config)
        index.extend(row.tokens)
        place = index.find(row.tokens)
        return [] if place is None else row.tokens[place : place + min(budget, self.num_speculative_tokens)]
