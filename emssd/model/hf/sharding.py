"""Models that Transformers spreads over the processes of a tensor parallel run: their plans, and their heads."""

from __future__ import annotations

from typing import Any

from emssd.errors import UnsupportedModelError

__all__ = ["check_heads", "count_heads", "shards_of"]

_OPT = {
    "model.decoder.layers.*.self_attn.q_proj": "colwise",
    "model.decoder.layers.*.self_attn.k_proj": "colwise",
    "model.decoder.layers.*.self_attn.v_proj": "colwise",
    "model.decoder.layers.*.self_attn.out_proj": "rowwise",
    "model.decoder.layers.*.fc1": "colwise",
    "model.decoder.layers.*.fc2": "rowwise",
    "model.decoder.embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
}
"""A plan for ``opt``, as Transformers has none: by module, with ``*`` for a layer, one of its parallel styles."""


def shards_of(config: Any, size: int) -> Any:
    """The ``distributed_config`` for `from_pretrained` in `size` processes, or UnsupportedModelError: there is none."""
    from transformers.distributed.configuration_utils import DistributedConfig

    text, name = config.get_text_config(), config.model_type
    if name != "opt" and not (config.base_model_tp_plan or text.base_model_tp_plan):
        raise UnsupportedModelError(
            f"{name} cannot be spread over {size} processes: Transformers has no tensor parallel plan for it. Leave "
            f"model.tensor_parallel out, and run it on one device"
        )
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    if num_heads % size or num_kv_heads % size:
        possible = [n for n in range(2, num_kv_heads + 1) if num_heads % n == 0 and num_kv_heads % n == 0]
        what = f"take {' or '.join(map(str, possible))} processes" if possible else "run it on one device"
        raise UnsupportedModelError(
            f"{name} cannot be spread over {size} processes: it has {num_heads} query heads and {num_kv_heads} key "
            f"heads, and each process has to get equally many; {what}"
        )
    return DistributedConfig(tp_plan=dict(_OPT) if name == "opt" else "auto")


def count_heads(model: Any, size: int) -> None:
    """Let the attention of ``opt`` count the heads of this process, where it counts those of its config."""
    if model.config.model_type == "opt":
        for layer in model.model.decoder.layers:
            layer.self_attn.num_heads //= size


def check_heads(target: Any, size: int) -> None:
    """Refuse a model whose attention ran neither all heads in each process nor its part of them."""
    text = target.model.config.get_text_config()
    whole = text.num_attention_heads
    for index, layer in enumerate(target.layers):
        if layer.num_qo_heads not in (whole, whole // size):
            raise UnsupportedModelError(
                f"{type(target.model).__name__} cannot be spread over {size} processes: layer {index} runs "
                f"{layer.num_qo_heads} of {whole} query heads in each"
            )
