"""Chains whose tokens are all drafted in one pass, each from a distribution of its own place."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch

from emssd.attention.transfer import on_device
from emssd.decoding.top_tokens import top_choices
from emssd.drafting import Draft
from emssd.sampling.choice import Node
from emssd.sampling.draws import behind

__all__ = ["Chain", "joined_chains", "parallel_chains"]

Chain = list[tuple[int, float]]
"""Tokens, and how sure the drafter is of each, from 0 to 1."""


def parallel_chains(firsts: Seq[Node], lengths: Seq[int], logits: torch.Tensor) -> list[Chain]:
    """The likeliest token of each place, in the eyes of the target's sampling: with the noise of that place.

    A chain ends where its params leave nothing to draw. A GPU's host waits once; twice for greedy and sampled rows; and
    once for each place of the longest chain if a row has penalties, which read what was drafted before.

    Args:
        firsts: ``[r]`` where the first token of each chain is chosen.
        lengths: ``[r]`` tokens to draft.
        logits: ``[sum(lengths), vocab]`` for them, row after row.
    """
    places = [(row, depth) for row, length in enumerate(lengths) for depth in range(length)]
    steps: list[Seq[int]] = [range(len(places))]
    if any(first.params.reads_prefix for first in firsts):
        levels = range(max(lengths))
        steps = [[at for at, (_, depth) in enumerate(places) if depth == level] for level in levels]
    chains: list[Chain] = [[] for _ in firsts]
    for step in steps:
        paths = [[token for token, _ in chain] for chain in chains]
        nodes = [behind(firsts[row], depth, paths[row]) for row, depth in (places[at] for at in step)]
        own = logits if len(step) == len(places) else logits[on_device(step, logits.device)]
        for at, tokens, log_probs in zip(step, *top_choices(own, nodes, 1), strict=True):
            row, depth = places[at]
            if tokens and len(chains[row]) == depth:
                chains[row].append((tokens[0], math.exp(log_probs[0])))
    return chains


def joined_chains(chains: Seq[Chain]) -> Draft:
    """A draft of one chain per row, ``[B]``, with its confidence."""
    shares = [[share for _, share in chain] for chain in chains]
    return Draft.from_chains([[token for token, _ in chain] for chain in chains], shares)
