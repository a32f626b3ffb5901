"""Plugin `drafter=dflash`: a trained head that drafts a whole block in one pass, from the target's hidden states.

Chen et al. 2026, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036; and DSpark, which adds a
Markov head and its own confidence, arXiv 2607.05147.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from emssd.drafting import Drafter, DrafterContext
from emssd.errors import ConfigError
from emssd.errors.ranges import AtLeastOne
from emssd.hooks import DrafterSpec, offering
from emssd_heads import TargetWeights

__all__ = ["DFlashConfig"]


@dataclass
class DFlashConfig:
    """Options of `drafter=dflash`.

    A draft is a chain and costs one pass of the head over a block, which is always as long as the head was trained for.

    Attributes:
        path: folder, file of weights or hub id of the head, which must be trained for this target.
        num_speculative_tokens: the most tokens drafted per row and step; ``null`` for all that a block gives.
    """

    path: str | None = None
    num_speculative_tokens: AtLeastOne | None = None


def _build(config: DFlashConfig, context: DrafterContext) -> Drafter:
    from emssd_heads.dflash.drafter import BlockRunner, DFlashDrafter, load_dflash

    lent = TargetWeights.by(context, "dflash")
    head = lent.loaded(config.path, partial(load_dflash, model=lent.target.model)).head
    count, most = config.num_speculative_tokens or head.variant.num_drafts, head.variant.num_drafts
    if count > most:
        raise ConfigError(f"drafter.num_speculative_tokens is {count}; a block of this head drafts {most} at most")
    return DFlashDrafter(BlockRunner(head, lent.make_cache(head.kv_cache_spec(lent.spec))), lent.target, count)


emssd_drafters = offering(DrafterSpec("dflash", DFlashConfig, _build, reads=("dflash",)))
