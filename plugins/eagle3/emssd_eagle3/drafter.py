"""Builds the drafter: the head, the hidden states that it reads, and a shape of its trees."""

from __future__ import annotations

from functools import partial

from emssd.drafters import Lent, PairedDrafter, chosen, shape_of
from emssd.drafting import DrafterContext
from emssd_eagle3 import Eagle3Config, LayerIds
from emssd_eagle3.loading import load_eagle3
from emssd_eagle3.measuring import MeasuringDrafter
from emssd_eagle3.parallel import MeasuringParallelDrafter, ParallelDrafter

__all__ = ["load_drafter"]


def load_drafter(config: Eagle3Config, context: DrafterContext) -> PairedDrafter:
    """A drafter with the head of `config`. Raises ConfigError: an option cannot work, or there is no such head for this
    target; or OutOfMemoryError: the target's device has no room for it.
    """
    shape = shape_of(config, "emssd.drafters.heads", top_k=config.top_k)
    layer_ids = chosen(LayerIds, "layer_ids", config.layer_ids)
    lent = Lent.by(context, "eagle3")
    loaded = lent.loaded(config.path, partial(load_eagle3, layer_ids=layer_ids))
    head, is_parallel = loaded.head, loaded.head.mask_token_id is not None
    if loaded.other_layers is None:
        drafter = (ParallelDrafter if is_parallel else PairedDrafter)(head, loaded.layers, shape, lent)
    else:
        unsure = MeasuringParallelDrafter if is_parallel else MeasuringDrafter
        drafter = unsure(head, (loaded.layers, loaded.other_layers), shape, lent)
    if lent.compile:
        head.keep_bytes()
    return drafter
