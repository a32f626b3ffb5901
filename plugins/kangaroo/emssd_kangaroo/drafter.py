"""Puts the drafter of `drafter=kangaroo` together: chains that end early where the adapter is not sure."""

from __future__ import annotations

import logging

from emssd.drafters import TreeDrafter, shallow_runner
from emssd.drafting import Drafter, DrafterContext
from emssd.drafting.shapes import DynamicShape, check_at_least_one
from emssd.errors import ConfigError
from emssd.heads import HeadRunner
from emssd.heads.lent import Lent
from emssd_kangaroo import KangarooConfig
from emssd_kangaroo.loading import load_adapter
from emssd_kangaroo.runner import KangarooRunner

__all__ = ["build"]

logger = logging.getLogger("emssd")


def build(config: KangarooConfig, context: DrafterContext) -> Drafter:
    """The drafter of `config`.

    Raises:
        ConfigError: an option cannot work, or there is no such adapter for this target.
        UnsupportedModelError: the target's layers are not found, or cannot be left out.
        OutOfMemoryError: the target's device has no room for the adapter.
    """
    check_at_least_one(num_speculative_tokens=config.num_speculative_tokens)
    length = config.num_speculative_tokens
    shape = DynamicShape(length, length, 1, min_confidence=config.min_confidence)
    if config.path is None:
        raise ConfigError("drafter=kangaroo drafts with a trained adapter: give drafter.path=FOLDER, or a hub id")
    lent, shallow = Lent.by(context, "kangaroo"), shallow_runner(context, config.num_layers)
    loaded = load_adapter(config.path, lent.sizes, dtype=lent.target.dtype, device=lent.target.device)
    layers = f"reads the residual stream behind {config.num_layers} layers, as drafter.num_layers says and no file does"
    for line in (*loaded.described, layers):
        logger.info("drafter=kangaroo: %s", line)
    own = loaded.adapter.kv_cache_spec(lent.spec)
    adapter = HeadRunner(loaded.adapter, lent.make_cache(own), compile=lent.compile)
    runner = KangarooRunner(shallow, config.num_layers, adapter, own.max_model_len, lent.target)
    return TreeDrafter(runner, context.vocab_size, shape)
