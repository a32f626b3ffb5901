"""Plugin `drafter=bigram`: drafts the most frequent follower of each token."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.drafting import Drafter, DrafterContext
from emssd.errors.ranges import AtLeastOne
from emssd.hooks import DrafterSpec, hookimpl

__all__ = ["BigramConfig", "emssd_drafters"]


@dataclass
class BigramConfig:
    """Options of `drafter=bigram`.

    Attributes:
        length: the most tokens to draft for a row in a step.
        min_count: only followers that were seen at least so often are drafted.
    """

    length: AtLeastOne = 4
    min_count: AtLeastOne = 1


def _build(config: BigramConfig, context: DrafterContext) -> Drafter:
    from emssd_bigram.drafter import BigramDrafter

    return BigramDrafter(config)


@hookimpl
def emssd_drafters() -> list[DrafterSpec]:
    """Offer the drafter."""
    return [DrafterSpec("bigram", BigramConfig, _build)]
