"""Builds the drafter: the layer, the target's last hidden state, and a shape of its trees."""

from __future__ import annotations

from emssd.drafters import Lent, PairedDrafter, shape_of
from emssd.drafting import DrafterContext
from emssd.errors import ConfigError
from emssd_mtp import MtpConfig
from emssd_mtp.loading import load_mtp

__all__ = ["load_drafter"]


def load_drafter(config: MtpConfig, context: DrafterContext) -> PairedDrafter:
    """A drafter with the layer that `config` names. Raises ConfigError: an option cannot work, or there is no such
    layer for this target; or OutOfMemoryError: the target's device has no room for it.
    """
    shape, lent = shape_of(config, "emssd.drafters.heads", top_k=config.top_k), Lent.by(context, "mtp")
    path = config.path or lent.target.model.name_or_path
    if not path:
        raise ConfigError(
            "drafter=mtp drafts with a layer of the target's checkpoint, and this target was read from none: give "
            "drafter.path=FOLDER, or a hub id"
        )
    loaded = lent.loaded(path, lambda path, _: load_mtp(path, lent))
    return PairedDrafter(loaded.head, loaded.layers, shape, lent)
