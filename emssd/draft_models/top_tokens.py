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

import torch

from emssd.attention.packed import on_device, to_host
from emssd.model.run.runner import likeliest
from emssd.sampling.choice import Node, alike, as_arrays, is_quick, kernels_for, scores_of, within_grammars

__all__ = ["Choices", "after", "likely_tokens", "on_host"]

Choices = tuple[list[list[int]], list[list[float]]]
"""For each node the likeliest tokens after it, the likeliest first, and the logarithms of how likely they are."""


def on_host(likely: torch.Tensor) -> Choices:
    """The tokens that `likely_tokens` gave, fewer at a node where some are excluded. A GPU's host waits once.

    A probability that is not a number counts as 0, as after a model that overflowed.
    """
    _, num_rows, width = likely.shape
    host, size, starts = to_host(likely.flatten()), num_rows * width, range(0, num_rows * width, width)
    tokens = list(map(int, host[:size]))
    shares = [share if share <= 0 else (0.0 if share > 0 else -math.inf) for share in host[size:]]
    ends = [start + width for start in starts]
    if -1 in tokens:  # after the others, as none is less likely
        ends = [start + width - tokens[start : start + width].count(-1) for start in starts]
    spans = list(zip(starts, ends, strict=True))
    return [tokens[start:end] for start, end in spans], [shares[start:end] for start, end in spans]


def likely_tokens(logits: torch.Tensor, nodes: Seq[Node] | None, width: int, temperature: float = 1.0) -> torch.Tensor:
    """For each node the `width` tokens that the target most likely chooses, the likeliest first.

    At a greedy node a token is as likely as ``softmax(logits / temperature)`` says. Where the target draws, its logits
    are taken to be the draft model's and, for each token, an error beside. With errors of a Gumbel distribution of the
    scale `temperature`, the largest of ``(logits + errors) / T + G`` is that of token ``i`` with the probability
    ``softmax((logits + T G) / temperature)[i]`` (McFadden's conditional logit). The host waits for nothing.

    Args:
        logits: ``[n, vocab]``.
        nodes: ``[n]``; ``None`` if all of them are greedy.
        width: how many tokens of each.
        temperature: above 0; how far the draft model's logits are from the target's.

    Returns:
        ``[2, n, width]`` float64: tokens, -1 in the place of one that cannot be drawn; and the logarithms of how likely
        they are. After a model that overflowed, the target draws nothing.
    """
    width = min(width, logits.shape[1])
    drawn = [] if nodes is None else [row for row, node in enumerate(nodes) if not node.params.is_greedy]
    if not drawn:
        if (kernels := kernels_for(logits)) is None:
            return likeliest(logits, width, 1.0 / temperature)
        top: torch.Tensor = kernels.top(logits, width, 1.0 / temperature)  # PyTorch takes three calls and more time
        return top
    assert nodes is not None
    if len(drawn) == len(nodes):
        return _drawn(logits, nodes, width, temperature)
    likely = torch.empty(2, len(nodes), width, dtype=torch.float64, device=logits.device)
    index = on_device(drawn, logits.device)
    likely[:, index] = _drawn(logits[index], [nodes[row] for row in drawn], width, temperature)
    index = on_device([row for row, node in enumerate(nodes) if node.params.is_greedy], logits.device)
    likely[:, index] = likely_tokens(logits[index], None, width, temperature)
    return likely


def after(node: Node, depth: int, path: Seq[int] = ()) -> Node:
    """The node `depth` tokens after `node`. The `path` between them is read only where the params read it."""
    if node.params.is_greedy or not depth:
        return node
    prefix = [*node.prefix, *path] if node.params.reads_prefix else ()
    state = node.state
    for token in path:
        state = None if state is None else state.after(token)
    return Node(node.params, node.key, node.position + depth, prefix, node.num_prompt, state)


def _drawn(logits: torch.Tensor, nodes: Seq[Node], width: int, temperature: float) -> torch.Tensor:
    logits = within_grammars(logits, nodes)
    likely = torch.empty(2, len(nodes), width, dtype=torch.float64, device=logits.device)
    left: Seq[int] = range(len(nodes))
    if (kernels := kernels_for(logits)) is not None:
        quick = [row for row, node in enumerate(nodes) if is_quick(node.params)]
        arrays = as_arrays(quick, [nodes[row] for row in quick], logits.shape[1])
        likely[:, quick] = kernels.top_draws(logits, *arrays, temperature, width)
        left = [row for row, node in enumerate(nodes) if not is_quick(node.params)]
    for rows in alike(nodes, left, logits.shape[1]):
        index, some = on_device(rows, logits.device), [nodes[row] for row in rows]
        scores = scores_of(logits[index], some) * ((some[0].params.temperature or 1.0) / temperature)
        shares, ids = scores.log_softmax(dim=1).topk(width, dim=1)
        likely[:, index] = torch.stack([ids.double(), shares])
    likely[0].masked_fill_(~(likely[1] > -math.inf), -1.0)  # also not a number
    return likely
