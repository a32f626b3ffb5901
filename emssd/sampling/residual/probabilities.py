"""`probabilities`: the distributions that tokens are drawn from, of a target or of a draft model."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from emssd.sampling.choice import Node, within_grammars
from emssd.sampling.processing import processed

__all__ = ["probabilities"]


def probabilities(logits: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
    """``[r, vocab]`` float64, after temperature, top-k, penalties and all else that the params of `nodes` ask for.

    Args:
        logits: ``[r, vocab]`` of a model.
        nodes: ``[r]``, at least one, all with the same `SamplingParams.processing`; its temperature is above 0.
    """
    params, logits = nodes[0].params, within_grammars(logits, nodes)
    return processed(logits, params, [node.prefix for node in nodes], [node.num_prompt for node in nodes]).softmax(-1)
