"""Plugin `drafter=anpd`: drafts token by token from the n-grams of the row's own text, the longest first."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.drafting import NGramDrafter
from emssd.errors import ConfigError
from emssd.errors.ranges import AtLeastOne, AtLeastZero
from emssd.hooks import DrafterSpec, offering

__all__ = ["ANPDConfig"]


@dataclass
class ANPDConfig:
    """Options of `drafter=anpd` (Ou et al. 2024, "Adaptive N-gram Parallel Decoding", arXiv 2404.08698).

    Other than a copy, a draft follows the text's latest habit at each token, and may so join several places.

    Attributes:
        max_ngram_size: tokens of the longest n-gram that is looked for after which a token is drafted (4; with that
            token these are the 5-grams of the paper).
        min_ngram_size: the shortest (1).
        num_speculative_tokens: the most tokens drafted per row and step.
        group_tokens: the outputs of all rows with the same prompt are remembered, and counted together with a row's own
            text, up to this many tokens in all: a rollout drafts from the other samples of its group, in this epoch and
            in earlier ones (DAS, arXiv 2511.13841). A token takes about 0.4 kB.
    """

    max_ngram_size: AtLeastOne = 4
    min_ngram_size: AtLeastOne = 1
    num_speculative_tokens: AtLeastOne = 8
    group_tokens: AtLeastZero = 0


class ANPDDrafter(NGramDrafter):
    """Drafts, per row, what followed the longest known n-gram most often, by its own text and its group's (§3.2)."""

    def __init__(self, config: ANPDConfig) -> None:
        longest, shortest, length = config.max_ngram_size, config.min_ngram_size, config.num_speculative_tokens
        if shortest > longest:
            raise ConfigError(
                f"drafter.min_ngram_size is {shortest}; it must be at most drafter.max_ngram_size={longest}"
            )
        super().__init__(longest, shortest, length, length, 1, config.group_tokens)


emssd_drafters = offering(DrafterSpec("anpd", ANPDConfig, lambda config, _: ANPDDrafter(config)))
