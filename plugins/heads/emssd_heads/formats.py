"""Recognises the published format of a trained head by its config, its file names and the names of its tensors.

Containers of the library ``speculators`` (0.7 to 0.9) are read as what the authors of each algorithm publish.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from emssd_heads.files import Checkpoint, cannot_load, in_short, reading_config

__all__ = ["Format", "detect", "expect", "unwrapped"]


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


_SIGNS = {
    Format.medusa: r"file medusa_lm_head\.|tensor (medusa_heads?\.)?(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\.",
    Format.hydra: r"file hydra_lm_head\.|tensor hydra_",
    Format.dflash: r"option dflash_config$|architecture .*(DFlash|DSpark)",
    Format.peagle: r"tensor mask_hidden$",
    Format.pard: r"option pard_token$",
    Format.eagle3: r"tensor (model\.)?(midlayer\.|d2t$|layers\.0\.hidden_norm\.weight$)",
    Format.eagle: r"tensor (model\.)?fc\.weight$",
    Format.mtp: r"tensor (model\.)?(mtp\.|layers\.\d+\.(enorm|hnorm|eh_proj)\.weight$)",
}
"""The signs of each format; the first format with one counts."""
_CONTAINERS = {"eagle3": Format.eagle3, "peagle": Format.peagle, "mtp": Format.mtp} | dict.fromkeys(
    ("dflash", "dflash2", "dspark", "xpress"), Format.dflash
)
"""By ``speculators_model_type``."""
_LAYERS = ("llama", "qwen3")  # model types of the layers in containers, but for those of a target's own kind
_MTP_TENSORS = {
    "mtp_layers.0.input_proj.": "mtp.fc.",
    "mtp_layers.0.final_layernorm.": "mtp.norm.",
    "mtp_layers.0.hidden_layernorm.": "mtp.pre_fc_norm_hidden.",
    "mtp_layers.0.token_layernorm.": "mtp.pre_fc_norm_embedding.",
    "mtp_layers.": "mtp.layers.",
}
"""Beginnings of tensor names in a container, and in the files of the authors; the first that fits counts."""


def detect(checkpoint: Checkpoint) -> Format:
    """The format of a checkpoint; without a sign of another one, a causal language model."""
    config, names = checkpoint.config, checkpoint.tensors
    container = config.get("speculators_model_type")
    if container is not None:
        return _CONTAINERS.get(container, Format.speculators)
    signs = [f"file {checkpoint.source.name}", *(f"option {name}" for name in config)]
    signs += [f"architecture {name}" for name in config.get("architectures") or ()]
    signs += [f"tensor {name}" for name in names]
    for kind, pattern in _SIGNS.items():
        if any(re.match(pattern, sign) for sign in signs):
            return kind
    parts = {part for name in names for part in name.split(".")}
    has_norm = "norm.weight" in names or "model.norm.weight" in names
    is_adapter = "self_attn" in parts and has_norm and not parts & {"mlp", "embed_tokens"}
    return Format.kangaroo if is_adapter else Format.causal_lm


def expect(checkpoint: Checkpoint, *wanted: Format) -> None:
    """Refuse a checkpoint of another format than those that are `wanted`.

    Raises:
        ConfigError: it says what the checkpoint is.
    """
    with reading_config(checkpoint.path):
        kind = detect(checkpoint)
    if kind not in wanted:
        named = " or ".join(one.value for one in wanted)
        raise cannot_load(checkpoint.path, f"what it holds is {kind.value}; what is wanted is {named}")


def unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """The parts of a container, with the names of the authors' files; anything else as it is.

    The values of its ``transformer_layer_config`` come to the top of the config, with the defaults of its class.

    Raises:
        ConfigError: the config of its layers is not one that Transformers takes.
    """
    container = checkpoint.config.get("speculators_model_type")
    if not isinstance(container, str) or container not in _CONTAINERS:
        return checkpoint
    kind, path, tensors = _CONTAINERS[container], checkpoint.path, checkpoint.tensors
    with reading_config(path):
        values = {**_layers(path, checkpoint.config, kind), **checkpoint.config}
        if kind is Format.dflash and (ids := values.get("aux_hidden_state_layer_ids")):
            values["target_layer_ids"] = [stream - 1 for stream in ids]  # outputs of layers, as the authors number
        if values.get("sliding_window_non_causal", container == "dflash2"):
            values["is_causal"] = False
    if kind is Format.mtp:
        beginnings = ((name, next(filter(name.startswith, _MTP_TENSORS), "")) for name in tensors)
        tensors = {_MTP_TENSORS.get(old, "") + name.removeprefix(old): tensors[name] for name, old in beginnings}
    return replace(checkpoint, config=values, tensors=tensors)


def _layers(path: str, config: Mapping[str, Any], kind: Format) -> dict[str, Any]:
    from transformers import AutoConfig

    values = dict(config.get("transformer_layer_config") or {})
    model_type = values.pop("model_type", "qwen3")
    if kind is not Format.mtp and model_type not in _LAYERS:
        raise cannot_load(path, f"its layers are those of {model_type}; supported are {' and '.join(_LAYERS)}")
    try:
        whole: dict[str, Any] = AutoConfig.for_model(model_type, **values).to_dict()
    except Exception as error:  # Transformers checks values with errors of several libraries
        why = f"Transformers does not take its transformer_layer_config ({in_short(error)})"
        raise cannot_load(path, why) from error
    whole.pop("tie_word_embeddings", None)  # of the target's tables, not of the drafter's
    return whole
