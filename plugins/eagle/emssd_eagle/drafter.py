"""Builds the drafter: the head, the target's last hidden state, and a shape of its trees."""

from __future__ import annotations

import logging

from emssd.drafting import DrafterContext
from emssd.heads import LAST_NORMED
from emssd.heads.lent import Lent
from emssd.heads.options import head_path, shape_of
from emssd.heads.paired import PairedDrafter
from emssd_eagle import EagleConfig
from emssd_eagle.loading import load_eagle

__all__ = ["load_drafter"]

logger = logging.getLogger("emssd")


def load_drafter(config: EagleConfig, context: DrafterContext) -> PairedDrafter:
    """A drafter with the head of `config`.

    Raises:
        ConfigError: an option cannot work, or there is no such head for this target.
        OutOfMemoryError: the target's device has no room for it.
    """
    shape, path, lent = shape_of(config), head_path(config.path, "eagle"), Lent.by(context, "eagle")
    loaded = load_eagle(path, lent.sizes, dtype=lent.target.dtype, device=lent.target.device)
    for line in loaded.described:
        logger.info("drafter=eagle: %s", line)
    return PairedDrafter(loaded.head, (LAST_NORMED,), shape, lent)
