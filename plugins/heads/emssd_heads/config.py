"""The sizes and rules of a head's decoder layers, from a config of Llama's kind, and the sizes of its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from emssd_heads.files import cannot_load, reading_config

__all__ = ["LAST_NORMED", "DecoderConfig", "Embed", "Project", "TargetSizes"]

# Types of rotary frequencies that do not depend on the other sequences of a batch, and the parameters of each.
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
# Far beyond any published head; a larger one would take all memory before it is compared with a file of weights.
_MOST, _MOST_LAYERS = 2**20, 2**10


_CPU = torch.device("cpu")

LAST_NORMED = -1
"""Among numbers of hidden states: the last one, after the final norm. Number k is the residual stream before layer k,
counted from 0, and the number of layers is the stream after the last layer, before the norm."""

Embed = Callable[[torch.Tensor], torch.Tensor]
"""The target's embeddings ``[…, hidden_size]`` of token ids ``[…]``, as its first layer reads them."""

Project = Callable[[torch.Tensor], torch.Tensor]
"""The target's logits ``[n, vocab]`` of hidden states ``[n, hidden_size]`` that are normed already."""


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """Sizes of the model that a head drafts for, and the type and device of the head's weights."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and rules of a head's decoder layers.

    Attributes:
        hidden_act: of the MLPs, by Transformers' name.
        rope: Transformers' ``rope_parameters``, with ``rope_type`` and ``rope_theta``.
        max_position_embeddings: of its training. It is no limit, see `max_len`.
        windows: ``[num_layers]`` sliding windows, ``None`` for layers without.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    rope: Mapping[str, Any]
    max_position_embeddings: int
    windows: tuple[int | None, ...]

    @classmethod
    def read(cls, values: Mapping[str, Any], path: str) -> DecoderConfig:
        """Read the values of a ``config.json``; what is not there has the default of Transformers' Llama.

        The rotary parameters are always the head's own. Many heads have the base 10000, although their target has not.

        Raises:
            ConfigError: a size is missing, or the head has a kind of attention that is not supported.
        """
        from transformers.activations import ACT2FN

        if values.get("kv_lora_rank"):
            raise cannot_load(path, "its attention is of the kind MLA (kv_lora_rank), which emssd's heads do not have")
        missing = [name for name in ("hidden_size", "intermediate_size", "num_attention_heads") if not values.get(name)]
        if missing:
            raise cannot_load(path, f"its config.json has no {', '.join(missing)}")
        with reading_config(path):
            if (act := values.get("hidden_act") or "silu") not in ACT2FN:
                raise cannot_load(path, f"its hidden_act is {act!r}, which Transformers does not know")
            num_heads, num_layers = _size(values, "num_attention_heads"), _size(values, "num_hidden_layers", 1)
            longest = int(values.get("max_position_embeddings") or 2048)
            return cls(
                hidden_size=_size(values, "hidden_size"),
                intermediate_size=_size(values, "intermediate_size"),
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=_size(values, "num_key_value_heads", num_heads),
                head_dim=_size(values, "head_dim", _size(values, "hidden_size") // num_heads),
                rms_norm_eps=float(values.get("rms_norm_eps") or 1e-6),
                hidden_act=str(act),
                rope=_rope(values, longest, path),
                max_position_embeddings=longest,
                windows=tuple(_window(values, layer) for layer in range(num_layers)),
            )

    @property
    def max_len(self) -> int | None:
        """The longest sequence; ``None`` for any. Frequencies of type ``dynamic`` change beyond the trained length."""
        return self.max_position_embeddings if self.rope["rope_type"] == "dynamic" else None

    @property
    def described(self) -> str:
        """Its rules about positions, in words."""
        kind = "" if self.rope["rope_type"] == "default" else f", scaling {self.rope['rope_type']}"
        return f"rotary base {self.rope['rope_theta']:g}{kind}, the head's own"


def _size(values: Mapping[str, Any], name: str, default: int = 0) -> int:
    size, most = values.get(name) or default, _MOST_LAYERS if name == "num_hidden_layers" else _MOST
    if type(size) is not int or not 1 <= size <= most:
        raise ValueError(f"{name} is {size!r:.40}, and no whole number from 1 to {most}")
    return size


def _rope(values: Mapping[str, Any], longest: int, path: str) -> dict[str, Any]:
    """The rotary parameters in today's form; older configs have ``rope_theta`` and ``rope_scaling``."""
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise cannot_load(path, "its layers have different rotary embeddings, which is not supported")
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0)
    if rope["rope_type"] not in _NEEDED:
        why = f"its rotary embeddings are of type {rope['rope_type']}; supported are {', '.join(_NEEDED)}"
        raise cannot_load(path, why)
    if missing := [name for name in _NEEDED[rope["rope_type"]] if not rope.get(name)]:
        raise cannot_load(path, f"its rotary embeddings of type {rope['rope_type']} have no {', '.join(missing)}")
    partial = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise cannot_load(path, f"it rotates a part of each head only (partial_rotary_factor {partial})")
    if rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", longest)
    return rope


def _window(values: Mapping[str, Any], layer: int) -> int | None:
    """A layer's sliding window. A window without ``layer_types`` is left over from another config."""
    types, window = values.get("layer_types") or (), values.get("sliding_window")
    slides = layer < len(types) and types[layer] == "sliding_attention"
    return int(window) if slides and window else None
