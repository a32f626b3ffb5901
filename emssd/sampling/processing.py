"""Logits after the processing that `SamplingParams` ask for: by Transformers' processors, in float64."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import torch

from emssd.attention.packed import on_device
from emssd.sampling.params import SamplingParams

__all__ = ["processed"]


def processed(
    logits: torch.Tensor, params: SamplingParams, prefixes: Seq[Seq[int]] = (), num_prompt: Seq[int] = ()
) -> torch.Tensor:
    """``[r, vocab]`` float64 logits that tokens are drawn with; the softmax of them is the target's distribution.

    Args:
        prefixes: ``[r]`` the tokens before each choice, prompt included; only where `params` read it.
        num_prompt: ``[r]`` how many of these are the prompt; as `prefixes`.
    """
    scores = raw = logits.double()
    if params.logit_bias:
        biases = _row([*params.logit_bias.values()], scores).expand(len(scores), -1)
        scores = scores.index_add(1, on_device([*params.logit_bias], scores.device), biases)
    if params.reads_prefix:
        rows = zip(scores.unsqueeze(1), prefixes, num_prompt, strict=True)
        scores = torch.cat([_after(row, params, prefix, length) for row, prefix, length in rows])
    if params.grammar is not None:  # it also holds where penalties and biases leave none of its tokens
        scores = torch.where(scores.amax(dim=1, keepdim=True) == -math.inf, raw, scores)
    return warped(scores, params) if params.temperature else scores


def warped(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """``scores [r, vocab]`` after temperature, top-k, top-p, min-p and typical-p; -inf for tokens that these drop."""
    from transformers.generation import logits_process as of

    if params.temperature != 1:
        scores = scores / params.temperature
    warper: Any  # Transformers' have annotations that do not fit how they are called
    if params.top_k:
        warper = of.TopKLogitsWarper(params.top_k)
        scores = warper(None, scores)
    if params.top_p < 1:
        warper = of.TopPLogitsWarper(params.top_p)
        scores = _with_ties(scores, warper(None, scores))
    if params.min_p > 0:
        warper = of.MinPLogitsWarper(params.min_p)
        scores = warper(None, scores)
    if params.typical_p < 1:
        warper = of.TypicalLogitsWarper(float(params.typical_p))
        scores = warper(None, scores)
    return scores


def _with_ties(scores: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Also the tokens that are as probable as the last of those `left`: which of equal ones comes last is by chance."""
    least = left.masked_fill(left == -math.inf, math.inf).amin(dim=-1, keepdim=True)
    return scores.masked_fill(scores < least, -math.inf)


def _after(scores: torch.Tensor, params: SamplingParams, prefix: Seq[int], num_prompt: int) -> torch.Tensor:
    """``scores [1, vocab]`` of one choice, whose `prefix` begins with `num_prompt` tokens of the prompt."""
    from transformers.generation import logits_process as of

    processor: Any  # as above
    ids = on_device(list(prefix), scores.device).unsqueeze(0)
    if params.repetition_penalty != 1:
        processor = of.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
        scores = processor(ids, scores)
    if params.no_repeat_ngram_size:
        processor = of.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size)
        scores = processor(ids, scores)
    if params.counts_output and (counts := Counter(prefix[num_prompt:])):
        costs = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        scores = scores.index_add(1, on_device([*counts], scores.device), _row(costs, scores), alpha=-1)
    return scores


def _row(values: list[float], like: torch.Tensor) -> torch.Tensor:
    """``[1, n]`` float64 where `like` is."""
    return on_device(torch.tensor(values, dtype=torch.float64), like.device, torch.float64).unsqueeze(0)
