"""The matrix products of a model's shape by number of tokens, for the GPU benchmark: seconds, and bytes a second."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from emssd_flashinfer.recorded import CudaGraphCapture
from gpu_measure import median_seconds

__all__ = ["TOKENS", "products_of", "time_product"]

TOKENS, TUNED = (1, 2, 4, 8, 16, 32, 64, 80, 128), (8, 64)  # Inductor compiles for each
_WEIGHT_BYTES, _LAUNCHES = 2**29, 64  # of the weights that take turns, so that no cache holds them; in one graph


def products_of(shape: Mapping[str, Any]) -> list[tuple[int, int]]:
    """``(outputs, inputs)`` of the products of a config; also of those that read one input, joined."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    dim = shape.get("head_dim", hidden // heads)
    queries, keys = heads * dim, shape.get("num_key_value_heads", heads) * dim
    inner = [shape["ffn_dim"]] if "ffn_dim" in shape else [shape["intermediate_size"], 2 * shape["intermediate_size"]]
    outputs = [queries, keys, queries + 2 * keys, *inner, shape["vocab_size"]]
    return [*dict.fromkeys([*((count, hidden) for count in outputs), (hidden, queries), (hidden, inner[0])])]


def time_product(
    library: str, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    """By number of tokens, median seconds of a product in a CUDA graph, and the bytes that it moves in a second.

    Args:
        library: ``cublas``, ``cublaslt``, or ``inductor`` for the fastest that ``max-autotune`` finds.
    """
    on_gpu, size, rows = device.type == "cuda", torch.finfo(dtype).bits // 8, dict[str, tuple[float, float]]()
    count, most = (_LAUNCHES, max(1, _WEIGHT_BYTES // (outputs * inputs * size))) if on_gpu else (1, 1)
    weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _ in range(min(count, most))]
    product = torch.nn.functional.linear
    if library == "inductor":
        torch.compiler.reset()  # else it stops compiling after some shapes
        product = torch.compile(lambda x, weight: x @ weight.T, mode="max-autotune-no-cudagraphs", dynamic=False)
    elif on_gpu:
        torch.backends.cuda.preferred_blas_library(library)
    for tokens in TUNED if library == "inductor" else TOKENS:
        run = partial(_products, product, torch.randn(tokens, inputs, device=device, dtype=dtype), weights, count)
        seconds = median_seconds(CudaGraphCapture()(run) if on_gpu else run, device, repeats) / count
        rows[str(tokens)] = seconds, size * (outputs * inputs + tokens * (inputs + outputs)) / seconds
    if on_gpu:
        torch.backends.cuda.preferred_blas_library("default")
    return {"by_tokens": rows}


def _products(product: Any, source: torch.Tensor, weights: list[torch.Tensor], count: int) -> None:
    for weight in islice(cycle(weights), count):
        product(source, weight)
