"""Plans by which models are spread over processes: Transformers' own, and those that it lacks."""

from __future__ import annotations

from typing import Any

from emssd.errors import UnsupportedModelError

__all__ = ["check_heads", "check_shards", "distributed_options", "mend"]


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
"""For ``opt``, which Transformers has no plan for: by module, with ``*`` for a layer, one of its parallel styles."""


def check_shards(config: Any, size: int) -> None:
    """Refuse a model that cannot be spread over `size` processes, before any weights are loaded."""
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


def distributed_options(config: Any) -> Any:
    """The ``distributed_config`` for `from_pretrained`; the size is that of the process group."""
    from transformers.distributed.configuration_utils import DistributedConfig

    return DistributedConfig(tp_plan=dict(_OPT) if config.model_type == "opt" else "auto")


def mend(model: Any, size: int) -> None:
    """Let the attention of ``opt`` count the heads of this process, where it counts those of its config."""
    if model.config.model_type == "opt":
        for layer in model.model.decoder.layers:
            layer.self_attn.num_heads //= size


def check_heads(target: Any, size: int) -> None:
    """Refuse a model whose attention, as it ran, has neither all heads in each process nor its part of them."""
    text = target.model.config.get_text_config()
    whole = text.num_attention_heads
    for index, layer in enumerate(target.layers):
        if layer.num_qo_heads not in (whole, whole // size):
            raise UnsupportedModelError(
                f"{type(target.model).__name__} cannot be spread over {size} processes: layer {index} runs "
                f"{layer.num_qo_heads} of {whole} query heads in each"
            )
