"""Loads drafters of the DFlash family, from their authors' folders and from containers of ``speculators``."""

from __future__ import annotations

from typing import Any

from emssd.drafters import Format, HeadFiles, Loaded, TargetSizes
from emssd_dflash.head import BlockHead
from emssd_dflash.variant import Variant, variant_of

__all__ = ["load_dflash"]


def load_dflash(path: str, target: TargetSizes, model: Any) -> Loaded[BlockHead]:
    """Load a head. Tables of embeddings and logits that are copies of those of the target, `model`, are not kept.

    Raises:
        ConfigError: it is no drafter of the DFlash family, or none for this target, or not whole.
        OutOfMemoryError: the device has no room for it.
    """
    files = HeadFiles.read(path, target, Format.dflash, new_name=lambda name: name.removeprefix("model."))
    files.drop_copies(model)
    variant = variant_of(files)
    placed = {name: old for name, old in files.names.items() if name not in ("d2t", "t2d")}
    head = files.filled(lambda: BlockHead(variant, files.names, target), placed)
    head.target_ids = files.drafted_ids(variant.draft_vocab_size)
    return Loaded(head, variant.layers, _described(files, variant))


def _sees(variant: Variant) -> str:
    if all(variant.causal):
        return "causal"
    causal = [str(layer) for layer, each in enumerate(variant.causal) if each]
    return "which see each other" + (f" but in layers {', '.join(causal)}, which are causal" if causal else "")


def _described(files: HeadFiles, variant: Variant) -> tuple[str, ...]:
    slots = "the token behind it" if variant.from_anchor else "its own token"
    return (
        f"{variant.kind} drafter, read from {files.checkpoint.source.name}",
        f"reads residual streams before layers {', '.join(map(str, variant.layers))}",
        f"blocks of {variant.block_size} tokens with mask {variant.mask_token_id}, "
        f"{_sees(variant)}; a slot is for {slots}",
        variant.decoder.described,
    )
