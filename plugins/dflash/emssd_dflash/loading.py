"""Loads DFlash and DSpark drafters."""

from __future__ import annotations

from dataclasses import dataclass

from emssd.heads import Checkpoint, Format, TargetSizes, drop_copies, expect, fill, made_empty, read_checkpoint, rename
from emssd.model import BorrowedTarget
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


def load_dflash(path: str, target: BorrowedTarget, vocab_size: int) -> LoadedBlockHead:
    """Load a head. Tables of embeddings and logits that are copies of the target's are not loaded again.

    Args:
        path: folder, file of weights or hub id.
        target: that it is to draft for.
        vocab_size: the target's.

    Raises:
        ConfigError: it is no DFlash or DSpark drafter, or none for this target, or not whole.
        OutOfMemoryError: the device has no room for it.
    """
    checkpoint = read_checkpoint(path)
    expect(checkpoint, Format.dflash)
    names = rename(checkpoint, lambda name: name.removeprefix("model."))
    drop_copies(names, checkpoint, target.model)
    sizes = TargetSizes(vocab_size, target.hidden_size, target.num_layers)
    variant = variant_of(checkpoint, names, sizes)
    head = made_empty(lambda: BlockHead(variant, names, sizes))
    fill(head, checkpoint, names, dtype=target.dtype, device=target.device)
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
