"""Loads DFlash and DSpark drafters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from emssd.heads import Checkpoint, Format, TargetSizes, expect, fill, made_empty, read_checkpoint, rename
from emssd_dflash.head import BlockHead
from emssd_dflash.variant import Variant, variant_of

__all__ = ["LoadedBlockHead", "load_dflash"]


@dataclass(frozen=True, slots=True)
class LoadedBlockHead:
    """A head, and how it is to be used.

    Attributes:
        head: with its weights.
        described: what was found, a line each.
    """

    head: BlockHead
    described: tuple[str, ...]


def load_dflash(path: str, target: TargetSizes, *, dtype: torch.dtype, device: torch.device) -> LoadedBlockHead:
    """Load a head.

    Args:
        path: folder, file of weights or hub id.
        target: that it is to draft for.
        dtype, device: of the weights.

    Raises:
        ConfigError: it is no DFlash or DSpark drafter, or none for this target, or not whole.
        OutOfMemoryError: the device has no room for it.
    """
    checkpoint = read_checkpoint(path)
    expect(checkpoint, Format.dflash)
    names = rename(checkpoint, lambda name: name.removeprefix("model."))
    variant = variant_of(checkpoint, names, target)
    head = made_empty(lambda: BlockHead(variant, names, target))
    fill(head, checkpoint, names, dtype=dtype, device=device)
    return LoadedBlockHead(head, _described(checkpoint, variant))


def _sees(variant: Variant) -> str:
    if all(variant.causal):
        return "causal"
    causal = [str(layer) for layer, each in enumerate(variant.causal) if each]
    return "which see each other" + (f" but in layers {', '.join(causal)}, which are causal" if causal else "")


def _described(checkpoint: Checkpoint, variant: Variant) -> tuple[str, ...]:
    kind = "DSpark" if variant.markov_rank or variant.has_confidence else "DFlash"
    slots = "the token behind it" if variant.from_anchor else "its own token"
    return (
        f"{kind} drafter, read from {checkpoint.source.name}",
        f"reads residual streams before layers {', '.join(map(str, variant.layers))}",
        f"blocks of {variant.block_size} tokens with mask {variant.mask_token_id}, "
        f"{_sees(variant)}; a slot is for {slots}",
        variant.decoder.described,
    )
