"""Plugin `drafter=lookahead`: the target guesses further ahead in the same pass in which it verifies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from emssd.drafting import Drafter, DrafterContext
from emssd.errors.ranges import AtLeastOne, Meta
from emssd.hooks import DrafterSpec, offering

__all__ = ["LookaheadConfig"]


@dataclass
class LookaheadConfig:
    """Options of `drafter=lookahead` (Fu et al. 2024, "Break the Sequential Dependency", arXiv 2402.02057).

    A step verifies up to ``(ngram - 1) * (window + guesses) - 1`` tokens for a row. The defaults are published for one
    row of a 7B model on a GPU; on a CPU such steps rarely pay.

    Attributes:
        window: how many places ahead the target guesses (W, 7).
        ngram: a guess and the token that it follows are so long (N, 5).
        guesses: the most n-grams that are verified in a step, and kept for each first token (G, 7).
        prompt_pool: whether n-grams of the prompt are guesses, too.
    """

    window: AtLeastOne = 7
    ngram: Annotated[int, Meta(ge=2)] = 5
    guesses: AtLeastOne = 7
    prompt_pool: bool = True


def _build(config: LookaheadConfig, context: DrafterContext) -> Drafter:
    from emssd_lookahead.drafter import LookaheadDrafter

    return LookaheadDrafter(config)


emssd_drafters = offering(DrafterSpec("lookahead", LookaheadConfig, _build))
