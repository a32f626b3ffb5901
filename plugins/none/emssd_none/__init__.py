"""Plugin `drafter=none`: drafts nothing, so that the engine decodes plainly and greedily. The baseline."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from emssd.drafting import Draft, Drafter
from emssd.hooks import DrafterSpec, offering
from emssd.sequences import Batch

__all__ = ["NoneConfig"]


@dataclass
class NoneConfig:
    """`drafter=none` has no options."""


class NoneDrafter(Drafter):
    """Never drafts: every step gives each row the target's own token."""

    num_speculative_tokens = 0

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.empty(len(batch))


emssd_drafters = offering(DrafterSpec("none", NoneConfig, lambda *_: NoneDrafter()))
