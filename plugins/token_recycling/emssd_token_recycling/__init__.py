"""Plugin `drafter=token_recycling`: drafts from what the target thought of at earlier steps."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.drafting import Drafter, DrafterContext
from emssd.plugins import DrafterSpec, hookimpl

__all__ = ["TokenRecyclingConfig", "emssd_drafters"]


@dataclass
class TokenRecyclingConfig:
    """Options of `drafter=token_recycling` (Luo et al. 2024, "Turning Trash into Treasure", arXiv 2408.08696).

    Attributes:
        num_candidates: how many of the target's best tokens are remembered behind each token (8, as published).
        num_nodes: the most tokens drafted for one row in one step. 80 were published, for one row on a GPU.
        depth: the longest way through a draft (6, as published).
    """

    num_candidates: int = 8
    num_nodes: int = 32
    depth: int = 6


def _build(config: TokenRecyclingConfig, context: DrafterContext) -> Drafter:
    from emssd_token_recycling.drafter import TokenRecyclingDrafter

    return TokenRecyclingDrafter(config)


@hookimpl
def emssd_drafters() -> list[DrafterSpec]:
    """Offer the drafter."""
    return [DrafterSpec("token_recycling", TokenRecyclingConfig, _build)]
