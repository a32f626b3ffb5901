"""The most probable tokens behind each node, and how probable they are: what a drafter needs to grow a tree."""

from __future__ import annotations

import math

import torch

from emssd.attention.transfer import to_host
from emssd.native import loaded_kernels

__all__ = ["top_tokens"]


def top_tokens(logits: torch.Tensor, width: int, temperature: float = 1.0) -> tuple[list[list[int]], list[list[float]]]:
    """For each row of ``logits [n, vocab]`` its `width` most probable tokens, and the logarithms of how probable.

    A GPU's host waits once. A probability that is not a number counts as 0, as behind a model that overflowed.

    Args:
        logits: of any floating type.
        width: at least 1; cut to the vocabulary.
        temperature: that logits are divided by.
    """
    width, num_rows = min(width, logits.shape[1]), len(logits)
    if logits.device.type == "cpu" and logits.dtype is not torch.float16 and (kernels := loaded_kernels()) is not None:
        both = kernels.top(logits, width, 1.0 / temperature)  # PyTorch takes three calls and several times as long
    else:
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        values, ids = scaled.topk(width, dim=1)
        both = torch.stack([ids.double(), (values - scaled.logsumexp(dim=1, keepdim=True)).double()])
    host = to_host(both.flatten())
    starts = range(0, num_rows * width, width)
    tokens = [[int(token) for token in host[start : start + width]] for start in starts]
    shares = [host[start + num_rows * width : start + (num_rows + 1) * width] for start in starts]
    return tokens, [[-math.inf if math.isnan(share) else min(share, 0.0) for share in row] for row in shares]
