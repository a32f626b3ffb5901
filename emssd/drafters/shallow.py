"""`shallow_runner`: the target's own first layers as the model that a drafter runs."""

from __future__ import annotations

from dataclasses import replace

from emssd.drafting import DrafterContext
from emssd.errors import ConfigError
from emssd.model import ModelRunner

__all__ = ["shallow_runner"]


def shallow_runner(context: DrafterContext, num_layers: int | None, *, trees: bool = False) -> ModelRunner:
    """The target's first layers, its final norm and its LM head, with a KV cache of their own.

    Args:
        context: lends the target.
        num_layers: how many; ``None`` for a quarter of them, rounded up.
        trees: whether the cache takes token trees.

    Raises:
        ConfigError: there is no target, or it has not so many layers.
        UnsupportedModelError: its layers are not found, or cannot be left out.
    """
    target, spec = context.target, context.cache_spec
    if target is None or spec is None or context.make_cache is None:
        raise ConfigError("the drafter runs layers of the target, and there is no model to take them of")
    if num_layers is None:
        num_layers = -(-target.num_layers // 4)
    if not 1 <= num_layers <= target.num_layers:
        raise ConfigError(f"drafter.num_layers is {num_layers}; choose 1 to {target.num_layers}, as the target has")
    own = replace(spec, layers=spec.layers[:num_layers], trees=trees, prefix_caching=False)
    return target.first_layers(num_layers, context.make_cache(own))
