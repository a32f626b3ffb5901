"""The published format of a trained head, told by its config, its file names and the names of its tensors.

Containers of the library ``speculators`` (0.7 to 0.9) are read as what the authors of each algorithm publish.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from emssd_heads.files import Checkpoint, cannot_load, reading_config

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


@dataclass(frozen=True, slots=True)
class _Container:
    """The layout of one algorithm's drafters in a container.

    Attributes:
        format: name of the `Format` that it is read as.
        layers: model types that its layers may have; none for any.
        tensors: beginnings of tensor names, and what stands there in the authors' files; the first that fits counts.
        is_block: whether its config numbers residual streams, where the authors number outputs of layers.
    """

    format: str
    layers: tuple[str, ...] = ("llama", "qwen3")
    tensors: tuple[tuple[str, str], ...] = ()
    is_block: bool = False


_BLOCK = _Container("dflash", is_block=True)
_MTP = _Container(
    "mtp",
    layers=(),
    tensors=(
        ("mtp_layers.0.input_proj.", "mtp.fc."),
        ("mtp_layers.0.final_layernorm.", "mtp.norm."),
        ("mtp_layers.0.hidden_layernorm.", "mtp.pre_fc_norm_hidden."),
        ("mtp_layers.0.token_layernorm.", "mtp.pre_fc_norm_embedding."),
        ("mtp_layers.", "mtp.layers."),
    ),
)
_CONTAINERS: Mapping[str, _Container] = {
    "eagle3": _Container("eagle3"),
    "peagle": _Container("peagle"),
    "dflash": _BLOCK,
    "dflash2": _BLOCK,
    "dspark": _BLOCK,
    "xpress": _BLOCK,
    "mtp": _MTP,
}
"""By ``speculators_model_type``."""

_MEDUSA_NAME = re.compile(r"(medusa_heads?\.)?(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\.weight$")
_MTP_NAME = re.compile(r"layers\.\d+\.(enorm|hnorm|eh_proj)\.weight$")  # of one more layer, after the model's own


def detect(checkpoint: Checkpoint) -> Format:
    """The format of a checkpoint. What nothing speaks against is a causal language model."""
    config, names = checkpoint.config, checkpoint.tensors
    container = config.get("speculators_model_type")
    if container is not None:
        return Format[_CONTAINERS[container].format] if container in _CONTAINERS else Format.speculators
    if checkpoint.source.name.startswith("medusa_lm_head.") or any(_MEDUSA_NAME.match(name) for name in names):
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
    if any(name.startswith("mtp.") or _MTP_NAME.match(name) for name in names):
        return Format.mtp
    return Format.causal_lm


def unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """The parts of a container, with the names of the authors' files; anything else as it is.

    The values of its ``transformer_layer_config`` come to the top of the config, with the defaults of its class.

    Raises:
        ConfigError: the config of its layers is not one that Transformers takes.
    """
    kind = checkpoint.config.get("speculators_model_type")
    if not isinstance(kind, str) or kind not in _CONTAINERS:
        return checkpoint
    container, path = _CONTAINERS[kind], checkpoint.path
    with reading_config(path):
        values = {**_layers(path, checkpoint.config, container), **checkpoint.config}
        if container.is_block and (ids := values.get("aux_hidden_state_layer_ids")):
            values["target_layer_ids"] = [each - 1 for each in ids]
        if values.get("sliding_window_non_causal", kind == "dflash2"):
            values["is_causal"] = False
    return replace(
        checkpoint,
        config=values,
        tensors={_renamed(name, container.tensors): tensor for name, tensor in checkpoint.tensors.items()},
    )


def _layers(path: str, config: Mapping[str, Any], container: _Container) -> dict[str, Any]:
    from transformers import AutoConfig

    values = dict(config.get("transformer_layer_config") or {})
    kind = values.pop("model_type", "qwen3")
    if container.layers and kind not in container.layers:
        raise cannot_load(path, f"its layers are those of {kind}; supported are {' and '.join(container.layers)}")
    try:
        whole: dict[str, Any] = AutoConfig.for_model(kind, **values).to_dict()
    except Exception as error:  # Transformers checks values with errors of several libraries
        said = " ".join(str(error).split())[:200].rstrip(" .")
        raise cannot_load(path, f"Transformers does not take its transformer_layer_config ({said})") from error
    whole.pop("tie_word_embeddings", None)  # of the target's tables, not of the drafter's
    return whole


def _renamed(name: str, beginnings: tuple[tuple[str, str], ...]) -> str:
    found = next((pair for pair in beginnings if name.startswith(pair[0])), ("", ""))
    return found[1] + name.removeprefix(found[0])
