"""Reads the published files of Kangaroo adapters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from emssd.heads import DecoderConfig, Format, TargetSizes, expect, fill, made_empty, read_checkpoint, rename
from emssd.heads.files import cannot_load
from emssd_kangaroo.adapter import KangarooAdapter

__all__ = ["LoadedAdapter", "load_adapter"]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter, and how it is to be used.

    Attributes:
        adapter: with its weights.
        described: the conventions that were chosen, a line each.
    """

    adapter: KangarooAdapter
    described: tuple[str, ...]


def load_adapter(path: str, target: TargetSizes, *, dtype: torch.dtype, device: torch.device) -> LoadedAdapter:
    """Load an adapter.

    Args:
        path: folder, file of weights or hub id.
        target: that it is to draft for.
        dtype, device: of the weights.

    Raises:
        ConfigError: it is no Kangaroo adapter, or none for this target, or not whole.
        OutOfMemoryError: the device has no room for it.
    """
    checkpoint = read_checkpoint(path)
    expect(checkpoint, Format.kangaroo)
    config, names = checkpoint.config, rename(checkpoint, lambda name: name.removeprefix("model."))
    decoder = DecoderConfig.read(config, path)
    if decoder.hidden_size != target.hidden_size:
        raise cannot_load(path, f"it has a hidden size of {decoder.hidden_size}, and the target {target.hidden_size}")
    if (vocab_size := config.get("vocab_size")) not in (None, target.vocab_size):
        raise cannot_load(path, f"its vocabulary has {vocab_size} tokens, and the target's has {target.vocab_size}")
    adapter = made_empty(lambda: KangarooAdapter(decoder, names))
    fill(adapter, checkpoint, names, dtype=dtype, device=device)
    lines = f"Kangaroo adapter, read from {checkpoint.source.name}", decoder.described
    return LoadedAdapter(adapter, lines)
