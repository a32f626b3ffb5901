"""Loads Kangaroo adapters."""

from __future__ import annotations

from emssd.drafters import DecoderConfig, Format, HeadFiles, LayerHead, Loaded, TargetSizes

__all__ = ["load_adapter"]


def load_adapter(path: str, target: TargetSizes, num_layers: int) -> Loaded[LayerHead]:
    """Load an adapter: an attention layer without MLP that reads the residual stream after `num_layers` of the target.
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
