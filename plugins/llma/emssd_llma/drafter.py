"""LLMA: retrieval from the sequence's own text.

Yang et al. 2023, "Inference with Reference: Lossless Acceleration of Large Language Models"; batched as in the EMS-SD
paper, §4.1: match length 2, copy length 7.
"""

from __future__ import annotations

from emssd.drafting import LookupDrafter, Occurrence
from emssd.errors import ConfigError
from emssd_llma import LLMAConfig, Search

__all__ = ["LLMADrafter"]


class LLMADrafter(LookupDrafter):
    """Drafts, per row, what followed the row's latest `match_length` tokens at an earlier place, or several.

    Args:
        config: see `LLMAConfig`.

    Raises:
        ConfigError: a length or a number of branches below one, or a choice that does not exist.
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
        num_behind = {config.match_length: config.copy_length if config.require_full_copy else 1}
        prompt_only = config.search == Search.prompt
        super().__init__(num_behind, config.copy_length, config.occurrence, prompt_only, config.branches)
