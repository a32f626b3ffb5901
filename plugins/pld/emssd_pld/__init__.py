"""Plugin `drafter=pld`: prompt lookup decoding copies the tokens after the longest n-gram that the text repeats."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.drafting import LookupDrafter, Occurrence
from emssd.errors import ConfigError
from emssd.errors.ranges import AtLeastOne
from emssd.hooks import DrafterSpec, offering

__all__ = ["Occurrence", "PLDConfig"]


@dataclass
class PLDConfig:
    """Options of `drafter=pld`; the defaults are those of `find_candidate_pred_tokens` in the method's README.

    Saxena 2023, "Prompt Lookup Decoding", https://github.com/apoorvumang/prompt-lookup-decoding. Transformers'
    ``prompt_lookup_num_tokens=10`` is ``max_ngram_size=2 require_full_copy=false``.

    Attributes:
        max_ngram_size: how many of the latest tokens are looked for first (3; 2 in Transformers).
        min_ngram_size: how few of them, when longer ones are not found (1).
        num_speculative_tokens: how many tokens are copied from after the match (10, ``num_pred_tokens``).
        occurrence: copy from the ``first`` or the ``last`` of several matches (first).
        require_full_copy: only matches with `num_speculative_tokens` after them count, and these begin before the
            latest n-gram itself (true; false in Transformers, where one token after the match is enough).
        branches: copy from up to this many matches of the longest n-gram that has any, in the order of `occurrence`,
            and draft the tree of these copies (1: a chain). Tokens that more copies share come first.
    """

    max_ngram_size: AtLeastOne = 3
    min_ngram_size: AtLeastOne = 1
    num_speculative_tokens: AtLeastOne = 10
    occurrence: Occurrence = Occurrence.first
    require_full_copy: bool = True
    branches: AtLeastOne = 1


class PLDDrafter(LookupDrafter):
    """Drafts, per row, what followed the row's latest n-gram earlier in its prompt and output, the longest n first."""

    def __init__(self, config: PLDConfig) -> None:
        longest, shortest, copied = config.max_ngram_size, config.min_ngram_size, config.num_speculative_tokens
        if shortest > longest:
            raise ConfigError(
                f"drafter.min_ngram_size is {shortest}; it must be at most drafter.max_ngram_size={longest}"
            )
        sizes = range(longest, shortest - 1, -1)
        num_behind = {size: max(copied, size + 1) if config.require_full_copy else 1 for size in sizes}
        super().__init__(num_behind, copied, config.occurrence, branches=config.branches)


emssd_drafters = offering(DrafterSpec("pld", PLDConfig, lambda config, _: PLDDrafter(config)))
