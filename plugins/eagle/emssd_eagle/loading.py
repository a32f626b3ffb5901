"""Loads EAGLE-1 and EAGLE-2 heads as their authors publish them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from emssd.heads import DecoderConfig, Format, TargetSizes, expect, fill, made_empty, read_checkpoint, rename
from emssd.heads.files import cannot_load
from emssd_eagle.head import EagleHead

__all__ = ["LoadedEagle", "load_eagle"]


@dataclass(frozen=True, slots=True)
class LoadedEagle:
    """A head, and how it is to be used.

    Attributes:
        head: with its weights. It reads the target's last hidden state, behind the final norm.
        described: the conventions that were chosen, a line each.
    """

    head: EagleHead
    described: tuple[str, ...]


def load_eagle(path: str, target: TargetSizes, *, dtype: torch.dtype, device: torch.device) -> LoadedEagle:
    """Load a head.

    Whether `fc` has a bias, the file says: configs of heads with and without one leave it out.

    Args:
        path: folder, file of weights or hub id.
        target: that it is to draft for.
        dtype, device: of the weights.

    Raises:
        ConfigError: it is no such head, or none for this target, or not whole.
        OutOfMemoryError: the device has no room for it.
    """
    checkpoint = read_checkpoint(path)
    expect(checkpoint, Format.eagle)
    config = checkpoint.config
    decoder = DecoderConfig.read(config, path)
    vocab_size = config.get("vocab_size")
    if decoder.hidden_size != target.hidden_size:
        raise cannot_load(
            path,
            f"it has a hidden size of {decoder.hidden_size}, and the target's is {target.hidden_size}; it was trained "
            f"for another target",
        )
    if vocab_size is not None and vocab_size != target.vocab_size:
        raise cannot_load(path, f"its vocabulary has {vocab_size} tokens, and the target's has {target.vocab_size}")
    names = rename(checkpoint, lambda name: name)
    if config.get("bias") and "fc.bias" not in names:
        raise cannot_load(path, "its config.json says that fc has a bias, and fc.bias is missing")
    head = made_empty(lambda: EagleHead(decoder, names, target.vocab_size))
    fill(head, checkpoint, names, dtype=dtype, device=device)
    return LoadedEagle(
        head,
        (
            f"EAGLE-1 or EAGLE-2 head, read from {checkpoint.source.name}",
            "reads the target's last hidden state, behind its final norm",
            f"fc has {'a' if head.fc.bias is not None else 'no'} bias",
            decoder.described,
            f"embeddings {'its own' if head.embed_tokens is not None else 'the target’s'}, vocabulary projection the "
            f"target's",
        ),
    )
