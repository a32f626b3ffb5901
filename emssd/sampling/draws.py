"""`top_draws`: a draft model's best guesses at what the target draws, as both draw with the same noise.

The target's token at a node is ``argmax(log p + G)``, and `G` is known before anything is drafted. So a draft model
with the distribution `q` guesses the largest of ``log q + G``, and further children of a node are the next largest
(Daliri et al. 2024, arXiv 2408.07978, §4; the largest `k` are a sample of `q` without replacement, Kool et al. 2019,
arXiv 1903.06059).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Seq

import torch

from emssd.attention.transfer import on_device, to_host
from emssd.sampling.choice import Node, scores_of

__all__ = ["behind", "top_draws"]

_BLOCK = 2**22  # entries of logits that are processed together, as in `choose`


def behind(node: Node, depth: int, path: Seq[int] = ()) -> Node:
    """The node that follows `node` after `depth` tokens.

    Args:
        node: where drafting begins.
        depth: at least 0.
        path: ``[depth]`` these tokens; only where the params of `node` read them.
    """
    if node.params.is_greedy or not depth:
        return node
    prefix = [*node.prefix, *path] if node.params.reads_prefix else ()
    return Node(node.params, node.key, node.position + depth, prefix, node.num_prompt)


def top_draws(
    logits: torch.Tensor, nodes: Seq[Node], width: int, error: float = 1.0
) -> tuple[list[list[int]], list[list[float]]]:
    """For each node the `width` tokens that the target most likely draws there, and the logarithms of how likely.

    The likelihood is that of a target whose logits are the draft model's and, for each token, an error beside. With
    errors of a Gumbel distribution of the scale `error`, the largest of ``(logits + errors) / T + G`` is that of token
    ``i`` with the probability ``softmax((logits + T G) / error)[i]`` (McFadden's conditional logit). At temperature 0
    it is ``softmax(logits / error)``, what `emssd.decoding.top_tokens` ranks by.

    A token that the params exclude is not among them, so that a node may have fewer. Behind a model that overflowed it
    has none. A GPU's host waits once.

    Args:
        logits: ``[n, vocab]`` of the draft model.
        nodes: ``[n]``.
        width: at least 1; cut to the vocabulary.
        error: above 0; how far the draft model's logits are from the target's.
    """
    width = min(width, logits.shape[1])
    both = torch.empty(2, len(nodes), width, dtype=torch.float64, device=logits.device)
    for places in _alike(nodes, max(1, _BLOCK // logits.shape[1])):
        index, own = on_device(places, logits.device), [nodes[place] for place in places]
        scores = scores_of(logits[index], own) * ((own[0].params.temperature or 1.0) / error)
        shares, ids = scores.log_softmax(dim=1).topk(width, dim=1)
        both[:, index] = torch.stack([ids.double(), shares])
    host = to_host(both.flatten())
    starts, shares_at = range(0, len(nodes) * width, width), len(nodes) * width
    tokens, log_probs = list[list[int]](), list[list[float]]()
    for start in starts:
        pairs = zip(host[start : start + width], host[shares_at + start : shares_at + start + width], strict=True)
        likely = [(int(token), min(share, 0.0)) for token, share in pairs if share > -math.inf]  # also no NaN
        tokens.append([token for token, _ in likely])
        log_probs.append([share for _, share in likely])
    return tokens, log_probs


def _alike(nodes: Seq[Node], most: int) -> Iterator[list[int]]:
    """The places of nodes that are processed together, `most` of them at a time."""
    groups: dict[Hashable, list[int]] = {}
    for place, node in enumerate(nodes):
        groups.setdefault(node.params.processing, []).append(place)
    for places in groups.values():
        for start in range(0, len(places), most):
            yield places[start : start + most]
