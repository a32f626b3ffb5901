"""Which models can be served: read from the config first, then proved by running the model once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from emssd.attention import LayerSpec, additive_mask, masked_attention
from emssd.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from emssd.model import TargetModel

__all__ = ["check_config", "probe_layers", "resolve_max_model_len"]

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
# Largest difference of logits, in standard deviations of the logits, between a packed run and the model's own. A
# feature that is lost or sequences that see each other move logits by about one; rounding stays far below. Many models
# compute softmax or norms in float32 whatever their dtype, so float64 has room for that.
_PROBE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.5}


def resolve_max_model_len(config: Any, max_model_len: int | None) -> int:
    """The longest sequence to allow.

    Raises:
        ConfigError: none is known and none is given, or it is not in the model's range.
        UnsupportedModelError: the model computes positions otherwise in sequences of that length.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    limit = int(limit) if limit is not None and limit > 0 else None
    if max_model_len is None:
        if limit is None:
            raise ConfigError(f"{config.model_type} has no length limit in its config; set model.max_model_len")
        max_model_len = limit
    elif max_model_len < 2 or (limit is not None and max_model_len > limit):
        raise ConfigError(f"max_model_len is {max_model_len}; this model takes 2 to {limit or 'any number of'} tokens")
    _check_rotary(text, config.model_type, max_model_len)
    return max_model_len


def check_config(config: Any, model_class: type | None) -> None:
    """Refuse, before any weights are loaded, what the config shows cannot be served at any length.

    Raises:
        UnsupportedModelError: with the reason.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    name = config.model_type
    if config.is_encoder_decoder:
        raise _refused(name, "it is an encoder-decoder model, and emssd decodes decoder-only language models")
    text = config.get_text_config()
    if model_class is None:
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise _refused(name, "Transformers has no causal language model for it")
        model_class = cast("type", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    if getattr(text, "alibi", False) or name in {"bloom", "mpt"}:
        raise _refused(name, "it encodes positions with ALiBi biases, which reach no attention function")
    layer_types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    foreign = sorted(set(layer_types) - _SERVED_LAYER_TYPES)
    if foreign:
        raise _refused(
            name,
            f"it has layers of type {', '.join(foreign)}; emssd serves full and sliding attention, whose cache can be "
            f"rolled back by any number of tokens",
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise _refused(
            name,
            "its code does not use Transformers' attention interface (recurrent and older architectures), so its "
            "KV cache cannot be managed from outside",
        )


def _check_rotary(text: Any, name: str, max_model_len: int) -> None:
    """Refuse rotary frequencies that change with the longest sequence of the batch.

    Those of type ``dynamic`` change only beyond ``max_position_embeddings``, where no sequence gets.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    # Models whose layers differ have one set of parameters for each type of layer.
    for values in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        original = values.get("original_max_position_embeddings") or 0
        if values.get("rope_type") == "longrope" and max_model_len > original:
            raise _refused(
                name,
                "its longrope rotary frequencies depend on the longest sequence of the batch; "
                + (f"model.max_model_len={original} or less works" if original else "no length avoids that"),
            )


def _refused(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} cannot be served: {reason}")


def probe_layers(target: TargetModel) -> tuple[LayerSpec, ...]:
    """Run two short sequences packed into one and learn, and prove, how the model attends.

    The packed run records every layer's shapes and rules; its logits must be those that the model's own eager
    attention gives for each sequence alone. That catches what no config tells: layers that keep a state, positions
    that are not taken from ``position_ids``, features that never reach the attention function.

    Raises:
        UnsupportedModelError: with the reason.
    """
    model, vocab_size = target.model, target.vocab_size
    lengths = [min(length, target.max_model_len) for length in (5, 3)]
    rows = [[(11 * i + 5 * row + 3) % vocab_size for i in range(length)] for row, length in enumerate(lengths)]
    layers: dict[int, LayerSpec] = {}

    def attend(
        layer: int, seen: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if layer in layers:
            raise UnsupportedModelError(f"{type(model).__name__} runs attention layer {layer} twice in a pass")
        layers[layer] = seen
        owner = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths)).to(query.device)
        mask = (owner[:, None] == owner[None, :]).tril()
        if seen.sliding_window is not None:
            mask = mask.triu(1 - seen.sliding_window)
        return masked_attention(query[None], key[None], value[None], additive_mask(mask[None], query.dtype), seen)[
            0
        ].contiguous()

    try:
        with torch.inference_mode():
            packed = target.run(
                torch.tensor([[token for row in rows for token in row]], device=target.device),
                torch.tensor([[i for row in rows for i in range(len(row))]], device=target.device),
                attend,
            )[0]
            with target._attention_implementation("eager"):
                alone = [model(torch.tensor([row], device=target.device), use_cache=False).logits[0] for row in rows]
    except RuntimeError as error:  # torch's own: a kernel that lacks this dtype or device, no memory left
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run in {target.dtype} on {target.device}: {error}"
        ) from error
    expected = target.model.config.get_text_config().num_hidden_layers
    if sorted(layers) != list(range(expected)):
        raise UnsupportedModelError(
            f"{type(model).__name__} sends {len(layers)} of its {expected} layers through the attention interface; "
            f"the others keep a state of their own, which cannot be rolled back"
        )
    _compare(type(model).__name__, packed, torch.cat(alone), target.dtype)
    return tuple(layers[layer] for layer in range(expected))


def _compare(name: str, packed: torch.Tensor, alone: torch.Tensor, dtype: torch.dtype) -> None:
    packed, alone = packed.double(), alone.double()
    difference = float((packed - alone).abs().max() / alone.std().clamp_min(1e-12))
    if not difference <= _PROBE_TOLERANCE[dtype]:
        raise UnsupportedModelError(
            f"{name} gives other logits when sequences are packed into one row (difference {difference:.3g} standard "
            f"deviations): it has a feature that does not go through its attention function"
        )
