"""The published format of a trained head, told by its config, its file names and the names of its tensors."""

from __future__ import annotations

import re
from enum import Enum

from emssd.drafters.heads.containers import CONTAINERS
from emssd.drafters.heads.files import Checkpoint, cannot_load, reading_config

__all__ = ["Format", "detect", "expect"]


class Format(Enum):
    """Published formats, by the words of messages. Not all can be loaded."""

    eagle = "an EAGLE-1 or EAGLE-2 head"
    eagle3 = "an EAGLE-3 head"
    peagle = "a P-EAGLE head, which drafts in parallel"
    medusa = "Medusa heads"
    hydra = "Hydra heads"
    kangaroo = "a Kangaroo adapter"
    dflash = "a DFlash drafter, which drafts blocks"
    pard = "a PARD draft model"
    mtp = "a model with layers for multi-token prediction"
    speculators = "a drafter of the speculators library that emssd does not know"
    causal_lm = "a language model"


_MEDUSA = re.compile(r"(medusa_heads?\.)?(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\.weight$")
_MTP = re.compile(r"layers\.\d+\.(enorm|hnorm|eh_proj)\.weight$")  # of one more layer, after the model's own


def detect(checkpoint: Checkpoint) -> Format:
    """The format of a checkpoint. What nothing speaks against is a causal language model."""
    config, names = checkpoint.config, checkpoint.tensors
    container = config.get("speculators_model_type")
    if container is not None:
        return Format[CONTAINERS[container].format] if container in CONTAINERS else Format.speculators
    if checkpoint.source.name.startswith("medusa_lm_head.") or any(_MEDUSA.match(name) for name in names):
        return Format.medusa
    if checkpoint.source.name.startswith("hydra_lm_head.") or any(name.startswith("hydra_") for name in names):
        return Format.hydra
    architectures = " ".join(map(str, config.get("architectures") or ()))
    if "dflash_config" in config or "DFlash" in architectures or "DSpark" in architectures:
        return Format.dflash
    if "mask_hidden" in names:
        return Format.peagle
    if "pard_token" in config:
        return Format.pard
    return _by_names(checkpoint)


def expect(checkpoint: Checkpoint, *wanted: Format) -> None:
    """Refuse a checkpoint of another format than those that are `wanted`.

    Raises:
        ConfigError: it says what the checkpoint is.
    """
    with reading_config(checkpoint.path):
        found = detect(checkpoint)
    if found not in wanted:
        named = " or ".join(each.value for each in wanted)
        raise cannot_load(checkpoint.path, f"what it holds is {found.value}; what is wanted is {named}")


def _by_names(checkpoint: Checkpoint) -> Format:
    names = {name.removeprefix("model.") for name in checkpoint.tensors}
    if any(name.startswith("midlayer.") for name in names) or names & {"d2t", "layers.0.hidden_norm.weight"}:
        return Format.eagle3
    if "fc.weight" in names:
        return Format.eagle
    attends, has_mlp = (any(f".{part}." in name for name in names) for part in ("self_attn", "mlp"))
    if attends and "norm.weight" in names and not has_mlp and "embed_tokens.weight" not in names:
        return Format.kangaroo
    if any(name.startswith("mtp.") or _MTP.match(name) for name in names):
        return Format.mtp
    return Format.causal_lm
