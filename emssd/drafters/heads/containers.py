"""Containers of the library ``speculators`` (0.7 to 0.9), read as what the authors of each algorithm publish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from emssd.drafters.heads.files import Checkpoint, cannot_load, reading_config

__all__ = ["CONTAINERS", "Container", "unwrapped"]


@dataclass(frozen=True, slots=True)
class Container:
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


_BLOCK = Container("dflash", is_block=True)
_MTP = Container(
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
CONTAINERS: Mapping[str, Container] = {
    "eagle3": Container("eagle3"),
    "peagle": Container("peagle"),
    "dflash": _BLOCK,
    "dflash2": _BLOCK,
    "dspark": _BLOCK,
    "xpress": _BLOCK,
    "mtp": _MTP,
}
"""By ``speculators_model_type``."""


def unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """The parts of a container, with the names of the authors' files; anything else as it is.

    The values of its ``transformer_layer_config`` come to the top of the config, with the defaults of its class.

    Raises:
        ConfigError: the config of its layers is not one that Transformers takes.
    """
    kind = checkpoint.config.get("speculators_model_type")
    if not isinstance(kind, str) or kind not in CONTAINERS:
        return checkpoint
    container, path = CONTAINERS[kind], checkpoint.path
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


def _layers(path: str, config: Mapping[str, Any], container: Container) -> dict[str, Any]:
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
