"""LLMA: retrieval from the sequence's own text, with an n-gram index that only ever grows.

Yang et al. 2023, "Inference with Reference: Lossless Acceleration of Large Language Models"; batched as in the EMS-SD
paper, §4.1: match length 2, copy length 7.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd.drafting import Draft, Drafter
from emssd.errors import ConfigError
from emssd.sequences import Batch, Sequence
from emssd_llma import LLMAConfig, Occurrence, Search

__all__ = ["LLMADrafter", "NGramIndex"]


class NGramIndex:
    """Where each n-gram of a growing text is followed by something to copy.

    Args:
        config: see `LLMAConfig`.
    """

    def __init__(self, config: LLMAConfig) -> None:
        self._config = config
        self._starts: dict[tuple[int, ...], int] = {}
        self._next = 0

    def extend(self, tokens: Seq[int], limit: int) -> None:
        """Index what is new in ``tokens[:limit]``.

        Each position is visited once in a sequence's life. An n-gram enters the index when enough tokens follow it:
        `copy_length` if a full copy is required, else one.
        """
        size = self._config.match_length
        needed = self._config.copy_length if self._config.require_full_copy else 1
        keep_first = self._config.occurrence == Occurrence.first
        for start in range(self._next, limit - size - needed + 1):
            gram = tuple(tokens[start : start + size])
            if not (keep_first and gram in self._starts):
                self._starts[gram] = start + size
            self._next = start + 1

    def find(self, gram: tuple[int, ...]) -> int | None:
        """Index of the token behind the chosen occurrence of `gram`, or ``None``."""
        return self._starts.get(gram)


class LLMADrafter(Drafter):
    """Drafts, per row, what followed the row's latest `match_length` tokens at an earlier place.

    Args:
        config: see `LLMAConfig`.

    Raises:
        ConfigError: a length below one, or a choice that does not exist.
    """

    def __init__(self, config: LLMAConfig) -> None:
        if config.match_length < 1 or config.copy_length < 1:
            raise ConfigError(
                f"drafter.match_length is {config.match_length} and drafter.copy_length is {config.copy_length}; "
                f"both must be at least 1"
            )
        if config.search not in set(Search) or config.occurrence not in set(Occurrence):
            raise ConfigError(
                f"drafter.search is {config.search!r} and drafter.occurrence is {config.occurrence!r}; choose "
                f"{' or '.join(Search)}, and {' or '.join(Occurrence)}"
            )
        self._config = config
        self._indexes: dict[str, NGramIndex] = {}
        self.num_speculative_tokens = config.copy_length

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.from_chains(self._copy(row, limit) for row, limit in zip(batch, budget, strict=True))

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._indexes.pop(request_id, None)

    def _copy(self, row: Sequence, budget: int) -> list[int]:
        config, tokens = self._config, row.tokens
        if budget == 0 or len(tokens) < config.match_length:
            return []
        index = self._indexes.get(row.request_id)
        if index is None:
            index = self._indexes[row.request_id] = NGramIndex(config)
        end = len(tokens) if config.search == Search.prompt_and_output else len(row.request.prompt_ids)
        index.extend(tokens, end)
        start = index.find(tuple(tokens[-config.match_length :]))
        return [] if start is None else tokens[start : min(start + min(config.copy_length, budget), end)]
