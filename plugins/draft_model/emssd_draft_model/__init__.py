"""Plugin `drafter=draft_model`: a smaller causal LM with the same tokenizer drafts greedily."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.drafting import Drafter, DrafterContext
from emssd.plugins import DrafterSpec, hookimpl

__all__ = ["DraftModelConfig", "emssd_drafters"]


@dataclass
class DraftModelConfig:
    """Options of `drafter=draft_model`; k = 4 is the setting of the EMS-SD paper.

    Attributes:
        path: folder or hub id of the draft model. ``demo-draft`` is the one that goes with ``model.path=demo``.
        num_speculative_tokens: tokens drafted per row and step (the paper's k).
    """

    path: str = "demo-draft"
    num_speculative_tokens: int = 4


def _build(config: DraftModelConfig, context: DrafterContext) -> Drafter:
    from emssd_draft_model.drafter import DraftModelDrafter

    return DraftModelDrafter.load(config, context)


@hookimpl
def emssd_drafters() -> list[DrafterSpec]:
    """Offer the drafter."""
    return [DrafterSpec("draft_model", DraftModelConfig, _build)]
