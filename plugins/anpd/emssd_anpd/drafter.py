"""Adaptive n-gram parallel decoding: each drafted token is what followed the longest known n-gram before it most often.

Ou et al. 2024, arXiv 2404.08698, §3.2. The n-grams are those of the row's prompt and output.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd.drafting import Draft, Drafter, NGramCounts
from emssd.errors import ConfigError
from emssd.sequences import Batch, Row
from emssd_anpd import ANPDConfig

__all__ = ["ANPDDrafter"]


class ANPDDrafter(Drafter):
    """Drafts, per row, by the n-grams of its own text.

    Args:
        config: see `ANPDConfig`.

    Raises:
        ConfigError: a size below one, or sizes in the wrong order.
    """

    def __init__(self, config: ANPDConfig) -> None:
        if not 1 <= config.min_ngram_size <= config.max_ngram_size or config.num_speculative_tokens < 1:
            raise ConfigError(
                f"drafter.min_ngram_size is {config.min_ngram_size}, drafter.max_ngram_size is "
                f"{config.max_ngram_size} and drafter.num_speculative_tokens is {config.num_speculative_tokens}; "
                f"all must be at least 1, and the second at least the first"
            )
        self.num_speculative_tokens = config.num_speculative_tokens
        self._config = config
        self._counts: dict[str, NGramCounts] = {}

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        drafts = [self._draft(row, limit) for row, limit in zip(batch, budget, strict=True)]
        return Draft.from_chains([tokens for tokens, _ in drafts], [sure for _, sure in drafts])

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._counts.pop(request_id, None)

    def _draft(self, row: Row, budget: int) -> tuple[list[int], list[float]]:
        """Tokens, and the share of each among all that followed its n-gram."""
        drafted, sure = list[int](), list[float]()
        if budget == 0:
            return drafted, sure
        longest, shortest = self._config.max_ngram_size, self._config.min_ngram_size
        if (counts := self._counts.get(row.request_id)) is None:
            counts = self._counts[row.request_id] = NGramCounts(longest)
        counts.extend(row.tokens)
        end = list(row.tokens[-longest:])
        while len(drafted) < min(budget, self.num_speculative_tokens):
            if not (following := counts.after(end, shortest)):
                break
            token = max(reversed(following), key=following.__getitem__)  # of equals the latest
            drafted.append(token)
            sure.append(following[token] / sum(following.values()))
            end = [*end[1 - longest :], token] if longest > 1 else [token]
        return drafted, sure
