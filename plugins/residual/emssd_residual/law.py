"""`check=plain` of `residual` sampling: whether the tokens of a run have the law of plain decoding, by two tests.

Each token is held against the target's distribution after the tokens before it, which one plain pass over the text
gives: by a G-test of where it falls there (Rosenblatt 1952, "Remarks on a multivariate transformation"), and by its
likelihood. See docs/decisions/0024-residual-sampling.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from emssd.attention.packed import on_device
from emssd.decoding.choosing import drawn_nodes
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.drafting.rule import LawReport
from emssd.model import ModelRunner
from emssd.sampling.choice import BLOCK, probabilities
from emssd.sequences import Generation, Request, Row
from emssd_residual.distributions import uniforms

__all__ = ["check_distribution"]

_LEAST_P_VALUE = 1e-6  # once in a million right runs is called wrong
_MOST_BINS, _TOKENS_PER_BIN = 20, 20
_LAST = 1 - 2**-53  # the largest number below 1


def check_distribution(generations: Seq[Generation], runner: ModelRunner, rows: Mapping[str, Row]) -> LawReport:
    """Test the tokens of `generations` together.

    In `LawReport.metrics`, ``p_bins`` and ``p_likelihood`` are how probable it is that counts of the G-test are at
    least so uneven, and the likelihood so far from what is expected, if the tokens have the law of plain decoding.
    ``p_value`` bounds how probable it is that one of the two is. ``num_impossible`` are tokens that top-k and the like
    leave out in the plain pass; rounding makes very few.

    Args:
        rows: by request id, as it began, which says how their tokens were drawn.
    """
    parts = [_tokens_of(generation, runner, rows[generation.request_id]) for generation in generations]
    before, shares, surprise, spread = torch.cat(parts).unbind(1)
    draw = uniforms(0, "check", 0)
    points = before + shares * torch.tensor([draw() for _ in shares], dtype=torch.float64)
    num_tokens, num_impossible = len(shares), int((shares == 0).sum())
    p_bins = _p_bins(points.clamp(max=_LAST))
    variance = float(spread.sum())  # of a sum of mean 0
    p_likelihood = math.erfc(abs(float(surprise.sum())) / math.sqrt(2 * variance)) if variance > 0 else 1.0
    p_value = min(1.0, 2 * min(p_bins, p_likelihood))
    is_right = p_value >= _LEAST_P_VALUE
    lines = [
        f"{num_tokens} tokens {'have' if is_right else 'DO NOT have'} the law of plain decoding, p = {p_value:.2g} "
        f"(G-test {p_bins:.2g}, likelihood {p_likelihood:.2g}; wrong below 1e-6)"
    ]
    if num_impossible:
        lines.append(f"  {num_impossible} of them are left out by top-k and the like in a plain pass")
    metrics = {"num_tokens": num_tokens, "num_impossible": num_impossible, "p_bins": p_bins}
    metrics |= {"p_likelihood": p_likelihood, "p_value": p_value, "right": is_right}
    return LawReport(is_right, tuple(lines), metrics)


def _p_bins(points: torch.Tensor) -> float:
    """The p-value of a G-test of whether ``points [n]``, from 0 to 1, are uniform."""
    num_bins = min(_MOST_BINS, max(2, len(points) // _TOKENS_PER_BIN))
    counts = torch.bincount((points * num_bins).long(), minlength=num_bins).double()
    statistic = 2 * torch.special.xlogy(counts, counts * (num_bins / len(points))).sum().clamp(min=0)
    return float(torch.special.gammaincc(torch.tensor((num_bins - 1) / 2, dtype=torch.float64), statistic / 2))


@torch.inference_mode()
def _tokens_of(done: Generation, runner: ModelRunner, begun: Row) -> torch.Tensor:
    """``[n, 4]`` on the host, for each token of `done`; see `_token_numbers`."""
    tokens, params = done.token_ids, begun.request.sampling
    request = Request("emssd_residual.law", done.prompt_ids, len(tokens), sampling=params)
    sequence, chain = Row(request, grammar=begun.grammar), Draft.from_chains([tokens[:-1]])
    try:
        logits = runner.run(pack([sequence], chain)).logits
    finally:
        runner.release([request.request_id])
    nodes, size = list(drawn_nodes(sequence, chain, 0)), max(1, BLOCK // logits.shape[1])
    blocks = [slice(start, start + size) for start in range(0, len(tokens), size)]
    return torch.cat([_token_numbers(probabilities(logits[at], nodes[at]), tokens[at]).cpu() for at in blocks])


def _token_numbers(probs: torch.Tensor, tokens: Seq[int]) -> torch.Tensor:
    """``[n, 4]`` for tokens drawn from ``probs [n, vocab]``: two probabilities, and two numbers of the likelihood.

    The first is that of all tokens that are more probable, or as probable with a smaller id; the second is its own. The
    third is by how much its ``log p`` is above the mean of that, and the last the variance.
    """
    probs = probs.nan_to_num()
    ids = on_device(tokens, probs.device).unsqueeze(1)
    shares = probs.gather(1, ids)
    is_before = (probs > shares) | ((probs == shares) & (torch.arange(probs.shape[1], device=probs.device) < ids))
    logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
    mean = (probs * logs).sum(dim=1, keepdim=True)
    spread = (probs * (logs - mean) ** 2).sum(dim=1, keepdim=True)
    surprise = torch.where(shares > 0, logs.gather(1, ids) - mean, 0)
    return torch.cat([(probs * is_before).sum(dim=1, keepdim=True), shares, surprise, spread], dim=1)
