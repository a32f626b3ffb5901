"""Adaptive n-gram parallel decoding: each drafted token is what followed the longest known n-gram before it most often.

Ou et al. 2024, arXiv 2404.08698, §3.2. The n-grams are those of the row's prompt and output.
"""

from __future__ import annotations

from emssd.drafting import NGramDrafter
from emssd.errors import ConfigError
from emssd_anpd import ANPDConfig

__all__ = ["ANPDDrafter"]


class ANPDDrafter(NGramDrafter):
    """Drafts, per row, by the n-grams of its own text, and of its group's.

    Args:
        config: see `ANPDConfig`.

    Raises:
        ConfigError: a size below one, or sizes in the wrong order.
    """

    def __init__(self, config: ANPDConfig) -> None:
        longest, shortest, length = config.max_ngram_size, config.min_ngram_size, config.num_speculative_tokens
        if not 1 <= shortest <= longest or length < 1:
            raise ConfigError(
                f"drafter.min_ngram_size is {shortest}, drafter.max_ngram_size is {longest} and "
                f"drafter.num_speculative_tokens is {length}; all must be at least 1, and the second at least the first"
            )
        super().__init__(longest, shortest, length, length, 1, config.group_tokens)
