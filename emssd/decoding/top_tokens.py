"""The likeliest tokens after each node, and how likely they are: what a drafter needs to grow a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch

from emssd.attention.packed import on_device, to_host
from emssd.model.runner import likeliest
from emssd.native import loaded_kernels
from emssd.sampling.choice import Node
from emssd.sampling.draws import top_draws

__all__ = ["likelihood", "top_choices", "top_tokens"]


def top_tokens(logits: torch.Tensor, width: int, temperature: float = 1.0) -> tuple[list[list[int]], list[list[float]]]:
    """For each row of ``logits [n, vocab]`` its `width` most probable tokens, and the logarithms of how probable.

    A GPU's host waits once. A probability that is not a number counts as 0, as after a model that overflowed.

    Args:
        width: at least 1; cut to the vocabulary.
        temperature: that logits are divided by.
    """
    width, num_rows = min(width, logits.shape[1]), len(logits)
    if logits.device.type == "cpu" and logits.dtype is not torch.float16 and (kernels := loaded_kernels()) is not None:
        both = kernels.top(logits, width, 1.0 / temperature)  # PyTorch takes three calls and several times as long
    else:
        both = likeliest(logits, width, 1.0 / temperature)
    host, starts = to_host(both.flatten()), range(0, num_rows * width, width)
    tokens = list(map(int, host[: num_rows * width]))
    shares = [share if share <= 0 else (0.0 if share > 0 else -math.inf) for share in host[num_rows * width :]]
    return [tokens[start : start + width] for start in starts], [shares[start : start + width] for start in starts]


def likelihood(share: float) -> float:
    """The logarithm of a probability, cut to at most 0; that of NaN is minus infinity."""
    return -math.inf if math.isnan(share) else min(share, 0.0)


def top_choices(
    logits: torch.Tensor, nodes: Seq[Node], width: int, temperature: float = 1.0
) -> tuple[list[list[int]], list[list[float]]]:
    """For each node the `width` tokens that the target most likely chooses, and the logarithms of how likely.

    At greedy nodes they are the `top_tokens`, at others the `top_draws`, where there may be fewer. A GPU's host waits
    once for each of the two.

    Args:
        logits: ``[n, vocab]`` of a draft model.
        nodes: ``[n]``.
        width: at least 1; cut to the vocabulary.
        temperature: that logits are divided by; of `top_draws` the ``error``.
    """
    greedy = [place for place, node in enumerate(nodes) if node.params.is_greedy]
    if len(greedy) == len(nodes):
        return top_tokens(logits, width, temperature)
    drawn = [place for place, node in enumerate(nodes) if not node.params.is_greedy]
    if not greedy:
        return top_draws(logits, nodes, width, temperature)
    tokens: list[list[int]] = [[]] * len(nodes)
    log_probs: list[list[float]] = [[]] * len(nodes)
    found = (
        (greedy, top_tokens(logits[on_device(greedy, logits.device)], width, temperature)),
        (drawn, top_draws(logits[on_device(drawn, logits.device)], [nodes[at] for at in drawn], width, temperature)),
    )
    for places, (own_tokens, own_log_probs) in found:
        for place, some_tokens, some_log_probs in zip(places, own_tokens, own_log_probs, strict=True):
            tokens[place], log_probs[place] = some_tokens, some_log_probs
    return tokens, log_probs
