"""`choose`: the target's next token after every node of a draft.

The choice is defined by `scores_of`, which PyTorch computes in float64. On a CPU, a kernel finds the same token in less
time: it takes logarithms only for tokens that may win. Where rounding could decide, between two totals or between a
share and its limit, the kernel leaves the choice to PyTorch. So the tokens are the same with kernels and without.

CPUs and GPUs hash to the same bits, but their logarithms and sums may differ in the last ones. From equal logits they
choose the same token, unless rounding decides.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from emssd.attention.packed import on_device
from emssd.native import loaded_kernels
from emssd.sampling.matching import MatcherState, masked
from emssd.sampling.noise import gumbel, noise_state
from emssd.sampling.params import SamplingParams
from emssd.sampling.processing import processed

__all__ = [
    "BLOCK", "Node", "alike", "as_arrays", "choose", "greedy_tokens", "is_quick", "kernels_for", "probabilities",
    "processed_at", "scores_of", "within_grammars",
]  # fmt: skip

BLOCK = 2**22  # entries of logits that are processed together: a float64 tensor of them takes 32 MiB
_AS_IT_IS = SamplingParams()  # scores that are processed already


@dataclass(frozen=True, slots=True)
class Node:
    """A point in a text at which a token is chosen.

    Attributes:
        params: of its request.
        key: of its request's noise, see `emssd.sampling.noise.noise_key`.
        position: index of the chosen token in its row, prompt included.
        prefix: the tokens before it, prompt included; only where `params` read it.
        num_prompt: how many of them are the prompt.
        state: the grammar's state there, if the request has one; ``None`` after a drafted token that may not follow.
    """

    params: SamplingParams
    key: int = 0
    position: int = 0
    prefix: Seq[int] = ()
    num_prompt: int = 0
    state: MatcherState | None = None


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """``[R]`` int64: the largest entry of each row of ``logits [R, vocab]``; the first wins a tie."""
    if (kernels := kernels_for(logits)) is not None:
        best: torch.Tensor = kernels.argmax(logits)  # PyTorch's own takes several times as long on two cores
        return best
    return logits.argmax(dim=-1)


def choose(logits: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
    """``[R]`` int64, the token chosen at each of ``nodes [R]``: ``argmax(log p + G)``, of ``logits [R, vocab]``.

    The first wins a tie. The choice is a function of the node and of its own row of logits. The host waits for nothing.
    """
    logits = within_grammars(logits, nodes)
    chosen = torch.full((len(nodes),), -1, dtype=torch.int64, device=logits.device)
    left: Seq[int] = range(len(nodes))
    if (kernels := kernels_for(logits)) is not None:
        quick = [row for row, node in enumerate(nodes) if is_quick(node.params)]
        drawn = _drawn(kernels, logits, quick, [nodes[row] for row in quick])
        if len(quick) == len(nodes):
            chosen = drawn
        else:
            chosen[quick] = drawn
        left = [row for row, token in enumerate(chosen.tolist()) if token < 0]
    for block in alike(nodes, left, logits.shape[1]):
        index = on_device(block, logits.device)
        some = logits if len(block) == len(nodes) else logits[index]
        takes_largest = nodes[block[0]].params.takes_largest
        chosen[index] = greedy_tokens(some) if takes_largest else _chosen(some, [nodes[row] for row in block])
    return chosen


def alike(nodes: Seq[Node] | Mapping[int, Node], rows: Seq[int], num_tokens: int) -> Iterator[list[int]]:
    """Blocks of `rows` whose logits of `num_tokens` are processed alike at ``nodes[row]``, some 32 MiB together."""
    groups: dict[Hashable, list[int]] = {}
    for row in rows:
        params = nodes[row].params
        groups.setdefault(None if params.takes_largest else params.processing, []).append(row)
    num_together = max(1, BLOCK // num_tokens)
    for group in groups.values():
        for start in range(0, len(group), num_together):
            yield group[start : start + num_together]


def scores_of(logits: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
    """``[r, vocab]`` float64, whose largest entry is chosen: processed logits, with the noise of the node's position.

    Args:
        logits: ``[r, vocab]`` of the model.
        nodes: ``[r]``, at least one, all with the same `SamplingParams.processing`.
    """
    scores = processed_at(within_grammars(logits, nodes), nodes)
    return scores + _noise(scores, nodes) if nodes[0].params.temperature else scores


def probabilities(logits: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
    """``[r, vocab]`` float64, the distributions that tokens are drawn from at `nodes`, as `scores_of` takes them."""
    return processed_at(within_grammars(logits, nodes), nodes).softmax(-1)


def within_grammars(logits: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
    """``[r, vocab]`` `logits` of ``nodes [r]``, with -inf for tokens that a grammar does not allow there."""
    return masked(logits, [node.state for node in nodes])


def processed_at(logits: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
    """`processed` logits ``[r, vocab]`` of nodes as `scores_of` takes them; no grammar is looked at."""
    return processed(logits, nodes[0].params, [node.prefix for node in nodes], [node.num_prompt for node in nodes])


def _noise(scores: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
    return gumbel([noise_state(node.key, node.position) for node in nodes], scores.shape[1], scores.device)


def _chosen(logits: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
    """``[r]`` int64, the largest entry of each row of `scores_of`."""
    scores = processed_at(logits, nodes)
    if nodes[0].params.temperature == 0:
        return greedy_tokens(scores)
    if (kernels := kernels_for(scores)) is not None:
        as_they_are = [Node(_AS_IT_IS, node.key, node.position) for node in nodes]
        drawn = _drawn(kernels, scores, range(len(nodes)), as_they_are)
        if bool((drawn >= 0).all()):
            return drawn
    return greedy_tokens(scores + _noise(scores, nodes))


def _drawn(kernels: Any, logits: torch.Tensor, rows: Seq[int], nodes: Seq[Node]) -> torch.Tensor:
    """``[n]`` int64, what the kernel draws of ``logits[rows]``; -1 where PyTorch must decide. As in `as_arrays`."""
    drawn: torch.Tensor = kernels.sample(logits, *as_arrays(rows, nodes, logits.shape[1]))
    return drawn


def as_arrays(rows: Seq[int], nodes: Seq[Node], num_tokens: int) -> list[torch.Tensor]:
    """The kernels' inputs of nodes with quick params: ``[n]`` rows, keys and positions, int64, and ``[n, 4]`` warps."""
    params = [node.params for node in nodes]
    warps = [value for p in params for value in (p.temperature, min(p.top_k, num_tokens), p.top_p, p.min_p)]
    arrays = (
        np.array(rows, dtype=np.int64),
        np.array([node.key for node in nodes], dtype=np.uint64).view(np.int64),
        np.array([node.position for node in nodes], dtype=np.int64),
        np.array(warps, dtype=np.float64).reshape(-1, 4),
    )
    return [torch.from_numpy(array) for array in arrays]


def is_quick(params: SamplingParams) -> bool:
    """Whether the kernels do all that they ask for: at most temperature, top-k, top-p and min-p."""
    return params.temperature > 0 and params.typical_p == 1 and not params.logit_bias and not params.reads_prefix


def kernels_for(logits: torch.Tensor) -> Any | None:
    """The operators, if they are loaded and take such logits."""
    return loaded_kernels() if logits.device.type == "cpu" and logits.dtype is not torch.float16 else None
