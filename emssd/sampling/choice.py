"""`choose`: the target's next token behind every node of a draft."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from emssd.attention.transfer import on_device
from emssd.native import loaded_kernels
from emssd.sampling.noise import gumbel, noise_state
from emssd.sampling.params import SamplingParams
from emssd.sampling.processing import processed

__all__ = ["Node", "choose", "greedy_tokens", "scores_of"]

_BLOCK = 2**22  # entries of logits that are processed together: a float64 tensor of them takes 32 MiB


@dataclass(frozen=True, slots=True)
class Node:
    """A place where a token is chosen.

    Attributes:
        params: of its request.
        key: of its request's noise, see `emssd.sampling.noise.noise_key`.
        position: index of the chosen token in its row, prompt included.
        prefix: the tokens before it, prompt included; only where `params` read it.
        num_prompt: how many of them are the prompt.
    """

    params: SamplingParams
    key: int = 0
    position: int = 0
    prefix: Seq[int] = ()
    num_prompt: int = 0


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """``[R]`` int64: the largest entry of each row of ``logits [R, vocab]``; the first wins a tie."""
    if logits.device.type == "cpu" and logits.dtype is not torch.float16 and (kernels := loaded_kernels()) is not None:
        best: torch.Tensor = kernels.argmax(logits)  # PyTorch's own takes several times as long on two cores
        return best
    return logits.argmax(dim=-1)


def choose(logits: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
    """``[R]`` int64, the token that is chosen at each node: ``argmax(log p + G)``; the first wins a tie.

    The choice is a function of the node's own row of logits, and of the node. The host waits for nothing.

    Args:
        logits: ``[R, vocab]`` of the model.
        nodes: ``[R]``.
    """
    groups: dict[Hashable, list[int]] = {}
    for place, node in enumerate(nodes):
        groups.setdefault(None if node.params.is_greedy else node.params.processing, []).append(place)
    chosen = torch.empty(len(nodes), dtype=torch.int64, device=logits.device)
    num_together = max(1, _BLOCK // logits.shape[1])
    for processing, places in groups.items():
        for start in range(0, len(places), num_together):
            block = places[start : start + num_together]
            index = on_device(block, logits.device)
            own = logits if len(block) == len(nodes) else logits[index]
            is_greedy = processing is None
            chosen[index] = greedy_tokens(own if is_greedy else scores_of(own, [nodes[place] for place in block]))
    return chosen


def scores_of(logits: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
    """``[r, vocab]`` float64, whose largest entry is chosen: processed logits, with the noise of the node's position.

    Args:
        logits: ``[r, vocab]`` of the model.
        nodes: ``[r]``, at least one, all with the same `SamplingParams.processing`.
    """
    params = nodes[0].params
    scores = processed(logits, params, [node.prefix for node in nodes], [node.num_prompt for node in nodes])
    if params.temperature == 0:
        return scores
    states = [noise_state(node.key, node.position) for node in nodes]
    return scores + gumbel(states, logits.shape[1], logits.device)
