"""The likeliest tokens of a head that drafts some of the target's tokens only."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch

from emssd.decoding.top_tokens import top_choices, top_tokens
from emssd.sampling.choice import Node

__all__ = ["head_choices"]


def head_choices(
    logits: torch.Tensor,
    nodes: Seq[Node],
    width: int,
    target_ids: torch.Tensor | None,
    vocab_size: int,
    temperature: float = 1.0,
) -> tuple[list[list[int]], list[list[float]]]:
    """For each node the `width` tokens that the target most likely chooses, as `top_choices` gives them.

    Where all nodes are greedy, only the head's own columns are looked at. Others need all of the target's tokens, as
    its noise, penalties and biases are for those: tokens that the head does not draft are impossible there.

    Args:
        logits: ``[n, draft_vocab_size]`` of the head.
        nodes: ``[n]``.
        width: at least 1; cut to the head's vocabulary.
        target_ids: ``[draft_vocab_size]`` the target's ids of the columns; ``None`` if they are the same.
        vocab_size: of the target.
        temperature: that logits are divided by.
    """
    width = min(width, logits.shape[1])
    if target_ids is None:
        return top_choices(logits, nodes, width, temperature)
    if all(node.params.is_greedy for node in nodes):
        columns, log_probs = top_tokens(logits, width, temperature)
        ids = target_ids[torch.tensor(columns, device=target_ids.device)].tolist()
        return ids, log_probs
    wide = logits.new_full((len(logits), vocab_size), -math.inf)
    wide[:, target_ids] = logits
    return top_choices(wide, nodes, width, temperature)
