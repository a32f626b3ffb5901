"""The bytes that a step must move, and the operations that it must compute; these set the least time it could take."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emssd.model import TargetModel

__all__ = ["Costs"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one model.

    Attributes:
        weight_bytes: of all weights that every step reads: everything but embedding tables, of which only rows are
            read, and of a mixture of experts as many as one token takes; a step whose tokens take others reads more.
        kv_bytes_per_token: keys and values of one token, all layers.
        matmul_parameters: weights that multiply each token, the vocabulary projection included, and of a mixture of
            experts as many as a token takes.
        attention_flops_per_kv_token: per query token and token of context, all layers.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    matmul_parameters: int
    attention_flops_per_kv_token: int

    @classmethod
    def of(cls, target: TargetModel) -> Costs:
        """Count the weights and heads of `target`, and of a target in shards those of this process."""
        import torch
        from torch.distributed.tensor import DTensor

        from emssd.model.compile.packed import PackedLinear

        model = target.model
        projection = model.get_output_embeddings()
        tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        tables -= {id(projection.weight)} if projection is not None else set()
        layers = [part for part in model.modules() if isinstance(part, PackedLinear)]
        packed = {id(part.weight): part.panels.numel() / part.weight.numel() for part in layers}
        taken = _share_of_experts(model.config.get_text_config())
        weights = [
            (weight, (weight.to_local() if isinstance(weight, DTensor) else weight).numel() * share)
            for name, weight in model.named_parameters()
            for share in [taken if ".experts." in name else 1]
            if id(weight) not in tables
        ]
        return cls(
            weight_bytes=int(sum(count * packed.get(id(weight), weight.element_size()) for weight, count in weights)),
            kv_bytes_per_token=target.kv_cache_spec(1).bytes_per_token(),
            matmul_parameters=int(sum(count for weight, count in weights if weight.ndim > 1)),
            attention_flops_per_kv_token=sum(
                2 * layer.num_qo_heads * (layer.key_dim + layer.value_dim) for layer in target.layers
            ),
        )

    def of_step(self, num_rows: float, num_tokens: float, num_kv_tokens: float) -> tuple[float, float]:
        """Bytes that a step has to move and operations that it has to compute; of a mean step too.

        Args:
            num_rows: rows of the batch, all alike; each of a row's tokens is taken to see all of its KV, nearly so.
            num_tokens: tokens that are computed, of all rows.
            num_kv_tokens: tokens of KV that the rows have after the step; each is read or written once.
        """
        attended = num_tokens * num_kv_tokens / num_rows
        flops = 2 * self.matmul_parameters * num_tokens + self.attention_flops_per_kv_token * attended
        return self.weight_bytes + self.kv_bytes_per_token * num_kv_tokens, flops


def _share_of_experts(config: Any) -> Fraction:
    """Of the experts of a layer, those that a token takes; 1 for a model that is no mixture of experts."""
    taken = getattr(config, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if taken and (there := getattr(config, name, None)):
            return Fraction(taken, there)
    return Fraction(1)
