"""Puts the drafter of `drafter=kangaroo` together: chains that end early where the adapter is not sure."""

from __future__ import annotations

import logging

from emssd.drafters import TreeDrafter, shallow_runner
from emssd.drafting import Drafter, DrafterContext
from emssd.drafting.shapes import DynamicShape, check_at_least_one
from emssd.errors import ConfigError
from emssd.heads import HeadRunner, TargetSizes
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
    shallow, target, spec = shallow_runner(context, config.num_layers), context.target, context.cache_spec
    assert target is not None, "shallow_runner wants what is asserted here too"
    assert spec is not None
    assert context.make_cache is not None
    sizes = TargetSizes(context.vocab_size, target.hidden_size, target.num_layers)
    loaded = load_adapter(config.path, sizes, dtype=target.dtype, device=target.device)
    layers = f"reads the residual stream behind {config.num_layers} layers, as drafter.num_layers says and no file does"
    for line in (*loaded.described, layers):
        logger.info("drafter=kangaroo: %s", line)
    own = loaded.adapter.kv_cache_spec(spec)
    adapter = HeadRunner(loaded.adapter, context.make_cache(own))
    runner = KangarooRunner(shallow, config.num_layers, adapter, own.max_model_len, target)
    return TreeDrafter(runner, context.vocab_size, shape)
