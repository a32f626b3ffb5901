"""Models for the GPU benchmark: real OPT shapes with random weights, made so that their greedy text is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["SHAPES", "Costs", "Shape", "continuation", "counting_model"]


@dataclass(frozen=True)
class Shape:
    """Numbers of an OPT model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int = 50272


SHAPES = {
    "opt-2.7b": Shape(2560, 32, 32),
    "opt-6.7b": Shape(4096, 32, 32),
    "opt-13b": Shape(5120, 40, 40),
    "tiny": Shape(64, 2, 4, vocab_size=512),
}


def counting_model(shape: Shape, dtype: torch.dtype, device: torch.device, max_model_len: int) -> Any:
    """An OPT model whose greedy continuation of a text that ends in token ``t`` is ``t + 1, t + 2, …``.

    All weights are random and all of them are used; but embeddings outweigh what the layers add to them, and the
    vocabulary projection is the embeddings moved on by one. So the next token is certain by a wide margin, rounding
    flips nothing, and every engine must generate the same text. The work per token is that of any OPT of the shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "opt",
        hidden_size=shape.hidden_size,
        word_embed_proj_dim=shape.hidden_size,
        ffn_dim=4 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=max(max_model_len, 2048),
        tie_word_embeddings=False,
    )
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.005, generator=generator)
        embedding = model.get_input_embeddings().weight
        embedding.normal_(0.0, 4.0, generator=generator)
        model.get_output_embeddings().weight.copy_(embedding.roll(1, dims=0) * 0.02)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def continuation(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """What a `counting_model` generates after `prompt`."""
    return [(prompt[-1] + 1 + i) % vocab_size for i in range(count)]


@dataclass(frozen=True)
class Costs:
    """What a step cannot do without: bytes to move and operations to compute.

    Attributes:
        weight_bytes: of all weights that every step reads: everything but the embedding tables.
        kv_bytes_per_token: keys and values of one token, all layers, heads not padded.
        parameters: that multiply each token, the vocabulary projection included.
        attention_flops: per query and token of context, all layers.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    parameters: int
    attention_flops: int

    @classmethod
    def of(cls, model: Any) -> Costs:
        tables = {id(model.get_input_embeddings().weight), id(model.model.decoder.embed_positions.weight)}
        weights = [parameter for parameter in model.parameters() if id(parameter) not in tables]
        config = model.config
        return cls(
            weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights),
            kv_bytes_per_token=2 * config.num_hidden_layers * config.hidden_size * model.dtype.itemsize,
            parameters=sum(weight.numel() for weight in weights if weight.ndim > 1),
            attention_flops=4 * config.num_hidden_layers * config.hidden_size,
        )

    def floor_seconds(
        self, batch: int, tokens: int, context: int, bytes_per_second: float, flops_per_second: float
    ) -> float:
        """The least time of a step of `batch` rows with `tokens` new tokens each behind `context` cached ones."""
        moved = self.weight_bytes + batch * (context + 2 * tokens) * self.kv_bytes_per_token
        flops = batch * tokens * (2 * self.parameters + self.attention_flops * (context + tokens))
        return max(moved / bytes_per_second, flops / flops_per_second)
