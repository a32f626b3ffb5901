"""Loads Kangaroo adapters, and builds the drafter: chains that end early where the adapter is not sure."""

from __future__ import annotations

from functools import partial

from emssd.drafters import (
    DecoderConfig,
    DynamicShape,
    Format,
    HeadFiles,
    HeadLane,
    LayerHead,
    Lent,
    Loaded,
    ModelDrafter,
    TargetSizes,
    check_at_least_one,
    shallow_runner,
)
from emssd.drafting import Drafter, DrafterContext
from emssd_kangaroo import KangarooConfig
from emssd_kangaroo.runner import KangarooRunner

__all__ = ["build", "load_adapter"]


def build(config: KangarooConfig, context: DrafterContext) -> Drafter:
    """The drafter of `config`. Raises ConfigError: an option cannot work, or there is no such adapter for this target;
    or UnsupportedModelError: the target's layers are not found, or cannot be left out; or OutOfMemoryError: the
    target's device has no room for the adapter.
    """
    check_at_least_one(num_speculative_tokens=config.num_speculative_tokens)
    length = config.num_speculative_tokens
    shape = DynamicShape(length, length, 1, min_confidence=config.min_confidence)
    lent, shallow = Lent.by(context, "kangaroo"), shallow_runner(context, config.num_layers)
    loaded = lent.loaded(config.path, partial(load_adapter, num_layers=config.num_layers))
    spec = loaded.head.kv_cache_spec(lent.spec)
    adapter = HeadLane(loaded.head, lent.make_cache(spec), compile=lent.compile)
    runner = KangarooRunner(shallow, config.num_layers, adapter, spec.max_model_len, lent.target)
    return ModelDrafter(runner, context.vocab_size, shape)


def load_adapter(path: str, target: TargetSizes, num_layers: int) -> Loaded[LayerHead]:
    """Load an adapter: an attention layer without MLP that reads the residual stream behind `num_layers` of the target.
    Raises ConfigError: it is no Kangaroo adapter, or none for this target, or not whole; or OutOfMemoryError: the
    device has no room for it.
    """
    files = HeadFiles.read(path, target, Format.kangaroo, new_name=lambda name: name.removeprefix("model."))
    decoder = DecoderConfig.read(files.config, path)
    files.check_sizes(decoder.hidden_size, files.config.get("vocab_size"))
    adapter = files.filled(lambda: LayerHead(decoder, files.names, mlp=False))
    described = (
        f"Kangaroo adapter, read from {files.checkpoint.source.name}",
        decoder.described,
        f"reads the residual stream behind {num_layers} layers, as drafter.num_layers says and no file does",
    )
    return Loaded(adapter, (num_layers,), described)
