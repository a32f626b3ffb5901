"""Plugin `drafter=ngrammys`: a tree of the text's own n-grams and of the target's own bigrams."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.drafting import Drafter, DrafterContext
from emssd.plugins import DrafterSpec, hookimpl

__all__ = ["NGrammysConfig", "emssd_drafters"]


@dataclass
class NGrammysConfig:
    """Options of `drafter=ngrammys` (Stewart et al. 2024, "The N-Grammys", arXiv 2411.03786).

    The bigrams are the tokens that the target held likeliest when it last computed a token. The authors compute them
    for the whole vocabulary beforehand, each token by itself.

    Attributes:
        max_ngram_size: tokens of the longest n-gram that is looked for in the row's own text.
        num_candidates: the bigrams that are remembered of each token.
        num_nodes: the most tokens drafted for one row in one step.
        depth: the longest way through a draft.
        bigram_share: how much of the probability of what comes next the bigrams have where the text has something to
            say; all of it where the text has nothing.
    """

    max_ngram_size: int = 4
    num_candidates: int = 4
    num_nodes: int = 16
    depth: int = 8
    bigram_share: float = 0.3


def _build(config: NGrammysConfig, context: DrafterContext) -> Drafter:
    from emssd_ngrammys.drafter import NGrammysDrafter

    return NGrammysDrafter(config)


@hookimpl
def emssd_drafters() -> list[DrafterSpec]:
    """Offer the drafter."""
    return [DrafterSpec("ngrammys", NGrammysConfig, _build)]
