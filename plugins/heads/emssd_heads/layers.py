"""Decoder layers of Llama's kind whose attention is handed to them, as a KV cache of ragged rows wants it."""

from __future__ import annotations

from collections.abc import Container
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from emssd.attention import LayerSpec
from emssd.model import Attend as LayerAttend
from emssd.model.compile.program import Attend
from emssd.model.hf.interface import PassAttention, implementation
from emssd_heads.config import DecoderConfig

__all__ = ["Angles", "Attend", "HeadLayer", "HeadNorm", "Rotary", "attending", "rotated"]

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, each ``[b, n, 1, head_dim]``."""


def attending(attend: LayerAttend) -> AbstractContextManager[None]:
    """For a body that runs a layer of the target's classes: its attention is `attend`."""
    return implementation(PassAttention(attend))


class HeadNorm(nn.Module):
    """Root mean square norm over the last axis, in float32 or wider (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, size]`` to ``[…, size]``."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * F.rms_norm(wide, self.weight.shape, None, self._eps).to(x.dtype)


class Rotary(nn.Module):
    """Angles of rotary positions. The frequencies are Transformers', and do not depend on the input."""

    inv_freq: torch.Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        with torch.device("cpu"):
            made: Any = LlamaRotaryEmbedding(
                LlamaConfig(
                    hidden_size=config.num_heads * config.head_dim,
                    num_attention_heads=config.num_heads,
                    num_key_value_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    max_position_embeddings=config.max_position_embeddings,
                    rope_parameters=dict(config.rope),
                )
            )
        self._scale = float(made.attention_scaling)
        self.register_buffer("inv_freq", made.inv_freq, persistent=False)

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> Angles:
        """Cosines and sines of ``position_ids [b, n]``, each ``[b, n, 1, head_dim]`` of type `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        angles = position_ids[..., None, None].to(wide) * self.inv_freq.to(wide)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


class HeadLayer(nn.Module):
    """A decoder layer, with the biases and norms that the checkpoint has.

    Args:
        names: the module's names for all tensors of the checkpoint, as in ``layers.0.self_attn.q_proj.bias``.
        input_size: elements of the input of queries, keys and values; by default the hidden size.
        normed: whether it norms its input itself.
        mlp: whether there is an MLP after its attention.
    """

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        names: Container[str],
        *,
        input_size: int | None = None,
        normed: bool = True,
        mlp: bool = True,
    ) -> None:
        super().__init__()
        prefix, hidden_size, eps = f"layers.{index}.", config.hidden_size, config.rms_norm_eps
        self.self_attn = HeadAttention(config, index, names, prefix, input_size or hidden_size)
        self._has_mlp = mlp
        if mlp:
            self.mlp = _mlp(config, any(f"{prefix}mlp.{name}_proj.bias" in names for name in ("gate", "up", "down")))
            self.post_attention_layernorm = HeadNorm(hidden_size, eps)
        if normed:
            self.input_layernorm = HeadNorm(hidden_size, eps)

    def forward(
        self, hidden: torch.Tensor, angles: Angles, attend: Attend, attended: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[b, n, hidden_size]``: attention and MLP, added to `hidden` of that shape.

        Attention reads ``attended [b, n, input_size]``; ``None`` for the layer's norm of `hidden`.
        """
        if attended is None:
            attended = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(attended, angles, attend)
        if self._has_mlp:
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden

    @property
    def spec(self) -> LayerSpec:
        """Shape and rules of its attention."""
        return self.self_attn.spec


class HeadAttention(nn.Module):
    """Queries, keys and values with grouped heads; with norms of each head, as in Qwen3, if the checkpoint has them."""

    def __init__(self, config: DecoderConfig, index: int, names: Container[str], prefix: str, input_size: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

        def linear(name: str, size: int, out: int) -> nn.Linear:
            return nn.Linear(size, out, bias=f"{prefix}self_attn.{name}.bias" in names)

        self.q_proj = linear("q_proj", input_size, heads * dim)
        self.k_proj = linear("k_proj", input_size, kv_heads * dim)
        self.v_proj = linear("v_proj", input_size, kv_heads * dim)
        self.o_proj = linear("o_proj", heads * dim, config.hidden_size)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if f"{prefix}self_attn.q_norm.weight" in names or f"{prefix}self_attn.k_norm.weight" in names:
            self.q_norm, self.k_norm = (HeadNorm(dim, config.rms_norm_eps) for _ in range(2))
        self.spec = LayerSpec(heads, kv_heads, dim, dim, dim**-0.5, config.windows[index])
        self._index = index

    def forward(self, x: torch.Tensor, angles: Angles, attend: Attend) -> torch.Tensor:
        """``[b, n, hidden_size]`` of ``x [b, n, input_size]``."""
        by_head = (*x.shape[:2], -1, self.spec.key_dim)
        query = rotated(self.q_norm(self.q_proj(x).view(by_head)), angles)
        key = rotated(self.k_norm(self.k_proj(x).view(by_head)), angles)
        value = self.v_proj(x).view(by_head)
        out = attend(self._index, query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1))
        return cast("torch.Tensor", self.o_proj(out.reshape(*x.shape[:2], -1)))


def _mlp(config: DecoderConfig, bias: bool) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaMLP

    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    make = cast("type[Any]", LlamaMLP)
    return cast("nn.Module", make(SimpleNamespace(**sizes, hidden_act=config.hidden_act, mlp_bias=bias)))


def rotated(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """``[b, n, heads, dim]`` with the two halves of each head rotated by the token's angles."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles
    return x * cos + torch.cat((-second, first), dim=-1) * sin
