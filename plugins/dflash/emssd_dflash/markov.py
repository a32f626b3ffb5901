"""`markov_chains`: tokens of a block that are chosen one after the other, as DSpark does.

DSpark, arXiv 2607.05147. Of a block's slots, each has its logits, and the token before adds to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch

from emssd.attention.transfer import on_device
from emssd.decoding.top_tokens import top_choices
from emssd.drafters import Chain
from emssd.sampling.choice import Node
from emssd.sampling.draws import behind
from emssd_dflash.head import BlockHead

__all__ = ["markov_chains"]


def markov_chains(
    head: BlockHead,
    firsts: Seq[Node],
    lengths: Seq[int],
    newest: Seq[int],
    hidden: torch.Tensor,
    logits: torch.Tensor,
) -> list[Chain]:
    """The likeliest token of each place behind the one before, in the eyes of the target's sampling.

    The confidence is that of the head, where it has one.

    Args:
        head: with a Markov head.
        firsts: ``[r]`` where the first token of each chain is chosen.
        lengths: ``[r]`` tokens to draft, at least 1.
        newest: ``[r]`` the token before the first.
        hidden: ``[sum(lengths), hidden_size]`` of the slots, behind the final norm, row after row.
        logits: ``[sum(lengths), vocab]`` of the slots.
    """
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    chains: list[Chain] = [[] for _ in firsts]
    for depth in range(max(lengths)):
        rows = [row for row, chain in enumerate(chains) if len(chain) == depth < lengths[row]]
        if not rows:
            break
        paths = [[token for token, _ in chains[row]] for row in rows]
        before = on_device([(newest[row], *path)[-1] for row, path in zip(rows, paths, strict=True)], logits.device)
        slots = on_device([starts[row] + depth for row in rows], logits.device)
        low = head.markov_head.markov_w1(before)
        nodes = [behind(firsts[row], depth, path) for row, path in zip(rows, paths, strict=True)]
        found, log_probs = top_choices(logits[slots] + head.markov_head.markov_w2(low), nodes, 1)
        if head.variant.has_confidence:
            read = torch.cat([hidden[slots], low], dim=-1) if head.variant.confidence_reads_markov else hidden[slots]
            sure: list[float] = head.confidence_head.proj(read).double().sigmoid().flatten().tolist()
        else:
            sure = [math.exp(each[0]) if each else 0.0 for each in log_probs]
        for row, tokens, share in zip(rows, found, sure, strict=True):
            if tokens:
                chains[row].append((tokens[0], share))
    return chains
