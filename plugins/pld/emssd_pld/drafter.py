"""Prompt lookup decoding: the row's latest n-gram is looked up in its own text, the longest n first.

Saxena 2023, "Prompt Lookup Decoding". The published function compares the n-gram with all windows of the text in every
step.
"""

from __future__ import annotations

from emssd.drafting import LookupDrafter, Occurrence
from emssd.errors import ConfigError
from emssd_pld import PLDConfig

__all__ = ["PLDDrafter"]


class PLDDrafter(LookupDrafter):
    """Drafts, per row, what followed the row's latest tokens at an earlier place of its prompt and output.

    Args:
        config: see `PLDConfig`.

    Raises:
        ConfigError: a size or `branches` below one, sizes in the wrong order, or a choice that does not exist.
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
        copied = config.num_speculative_tokens
        num_behind = {
            size: max(copied, size + 1) if config.require_full_copy else 1
            for size in range(config.max_ngram_size, config.min_ngram_size - 1, -1)
        }
        super().__init__(num_behind, copied, config.occurrence, branches=config.branches)
