"""The likeliest tokens after each node, and how likely they are: what a drafter needs to grow a tree.

Where a target draws, its token at a node is ``argmax(log p + G)``, and `G` is known before anything is drafted. So a
draft model with the distribution `q` guesses the largest of ``log q + G``, and further children of a node are the next
largest (Daliri et al. 2024, arXiv 2408.07978, §4; the largest `k` are a sample of `q` without replacement, Kool et al.
2019, arXiv 1903.06059).

On a CPU a kernel finds the same tokens in less time, unless rounding decides. It computes how likely they are in
float32, from float64 logits in float64. Only drafts depend on that, and never what is generated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any

import torch

from emssd.attention.packed import on_device, to_host
from emssd.model.runner import likeliest
from emssd.sampling.choice import Node, alike, as_arrays, is_quick, kernels_for, scores_of, within_grammars

__all__ = ["behind", "likelihood", "top_choices", "top_tokens"]


def top_tokens(logits: torch.Tensor, width: int, temperature: float = 1.0) -> tuple[list[list[int]], list[list[float]]]:
    """For each row of ``logits [n, vocab]`` its `width` most probable tokens, and the logarithms of how probable.

    A GPU's host waits once. A probability that is not a number counts as 0, as after a model that overflowed.
    """
    width, num_rows = min(width, logits.shape[1]), len(logits)
    if (kernels := kernels_for(logits)) is not None:
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


def behind(node: Node, depth: int, path: Seq[int] = ()) -> Node:
    """The node that follows `node` after `depth` tokens, the `path`; it is read only where the params read it."""
    if node.params.is_greedy or not depth:
        return node
    prefix = [*node.prefix, *path] if node.params.reads_prefix else ()
    state = node.state
    for token in path:
        state = None if state is None else state.after(token)
    return Node(node.params, node.key, node.position + depth, prefix, node.num_prompt, state)


def top_draws(
    logits: torch.Tensor, nodes: Seq[Node], width: int, error: float = 1.0
) -> tuple[list[list[int]], list[list[float]]]:
    """For each node the `width` tokens that the target most likely draws there, and the logarithms of how likely.

    The likelihood is that of a target whose logits are the draft model's and, for each token, an error beside. With
    errors of a Gumbel distribution of the scale `error`, the largest of ``(logits + errors) / T + G`` is that of token
    ``i`` with the probability ``softmax((logits + T G) / error)[i]`` (McFadden's conditional logit). At temperature 0
    it is ``softmax(logits / error)``, what `top_tokens` ranks by.

    A token that the params exclude is not among them, so that a node may have fewer. After a model that overflowed it
    has none. A GPU's host waits once.

    Args:
        error: above 0; how far the draft model's logits are from the target's.
    """
    width, logits = min(width, logits.shape[1]), within_grammars(logits, nodes)
    both = torch.empty(2, len(nodes), width, dtype=torch.float64, device=logits.device)
    left: Seq[int] = range(len(nodes))
    if (kernels := kernels_for(logits)) is not None:
        quick = [place for place, node in enumerate(nodes) if is_quick(node.params)]
        both[:, quick] = _by_kernel(kernels, logits, quick, [nodes[place] for place in quick], width, error)
        left = [place for place, node in enumerate(nodes) if not is_quick(node.params)]
    for places in alike(nodes, left, logits.shape[1]):
        index = on_device(places, logits.device)
        both[:, index] = _by_pytorch(logits[index], [nodes[place] for place in places], width, error)
    host = to_host(both.flatten())
    size = len(nodes) * width
    pairs = list(zip(host[:size], host[size:], strict=True))
    likely = [
        [(int(token), min(share, 0.0)) for token, share in pairs[at : at + width] if share > -math.inf]  # also no NaN
        for at in range(0, size, width)
    ]
    return [[token for token, _ in row] for row in likely], [[share for _, share in row] for row in likely]


def _by_pytorch(logits: torch.Tensor, nodes: Seq[Node], width: int, error: float) -> torch.Tensor:
    """``[2, r, width]`` float64: tokens of nodes that are processed alike, and the logarithms of how likely."""
    scores = scores_of(logits, nodes) * ((nodes[0].params.temperature or 1.0) / error)
    shares, ids = scores.log_softmax(dim=1).topk(width, dim=1)
    return torch.stack([ids.double(), shares])


def _by_kernel(
    kernels: Any, logits: torch.Tensor, rows: Seq[int], nodes: Seq[Node], width: int, error: float
) -> torch.Tensor:
    """The same of ``logits[rows]``, for nodes whose params are quick."""
    found: torch.Tensor = kernels.top_draws(logits, *as_arrays(rows, nodes, logits.shape[1]), error, width)
    return found
