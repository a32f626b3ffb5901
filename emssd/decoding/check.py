"""`check=plain`: compares a run with plain decoding, token by token, and explains every difference."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import permutations, product

import torch

from emssd.decoding.choosing import drawn_nodes
from emssd.decoding.distribution_check import DistributionReport
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.model import ModelRunner
from emssd.sampling.choice import Node, processed_at, scores_of
from emssd.sequences import Generation, Request, Row

__all__ = ["TIE_TOLERANCE", "CheckReport", "Difference", "compare"]

# Two tokens are tied when their logits differ by no more than this times the largest logit: a few units of rounding
# of the dtype, accumulated over the layers. See docs/exactness.md.
TIE_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a row departs from plain decoding.

    Attributes:
        request_id, sample: as in `Generation`.
        position: index among the new tokens.
        token, greedy_token: the tokens of the run and of plain decoding there (``None`` if it has ended).
        margin: by how much the target's logits of the two differ after the common prefix; of a sampled row, by how much
            what is compared to choose the token differs: processed logits with noise. A token that a cut-off such as
            top-p may have kept or not, as rounding has it, is compared as either.
        tolerance: up to which margin that is a numerical tie.
    """

    request_id: str
    position: int
    token: int | None
    greedy_token: int | None
    margin: float
    tolerance: float
    sample: int = 0

    @property
    def is_tie(self) -> bool:
        """Whether the target itself hardly prefers one of the two tokens."""
        return self.margin <= self.tolerance


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of a comparison: rows that are equal, and the first difference of each row that is not.

    Attributes:
        law: of rows with `residual` sampling, which are not compared but tested.
    """

    num_exact: int
    differences: tuple[Difference, ...]
    law: DistributionReport | None = None

    @property
    def ties(self) -> list[Difference]:
        """Rows whose first difference is a numerical tie."""
        return [difference for difference in self.differences if difference.is_tie]

    @property
    def true_differences(self) -> list[Difference]:
        """Rows whose first difference is none: a bug."""
        return [difference for difference in self.differences if not difference.is_tie]


def compare(
    generations: Seq[Generation],
    plain: Seq[Generation],
    runner: ModelRunner,
    rows: Mapping[str, Row] | None = None,
) -> CheckReport:
    """Compare `generations` with `plain`, row by row.

    A difference is judged by one fresh run of the target over the common prefix, by `runner`, which must be idle.

    Args:
        rows: by request id, as it began, which says how both chose their tokens; greedily by default.
    """
    num_exact = 0
    differences = []
    for ours, theirs in zip(generations, plain, strict=True):
        if ours.token_ids == theirs.token_ids:
            num_exact += 1
        else:
            differences.append(_first_difference(ours, theirs, runner, (rows or {}).get(ours.request_id)))
    return CheckReport(num_exact, tuple(differences))


def _first_difference(ours: Generation, theirs: Generation, runner: ModelRunner, begun: Row | None) -> Difference:
    pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=False))
    shorter = min(len(ours.token_ids), len(theirs.token_ids))
    position = next((i for i, (token, greedy) in pairs if token != greedy), shorter)
    token = ours.token_ids[position] if position < len(ours.token_ids) else None
    greedy_token = theirs.token_ids[position] if position < len(theirs.token_ids) else None
    prefix = (*ours.prompt_ids, *ours.token_ids[:position])
    logits = _logits_after(prefix, runner)
    tolerance = TIE_TOLERANCE[runner.dtype] * float(logits.abs().max())
    compared, tokens = [logits], [each for each in (token, greedy_token) if each is not None]
    if begun is not None and begun.request.sampling is not None:
        row = Row(replace(begun.request, sample=ours.sample), grammar=begun.grammar)
        row.extend(ours.token_ids[:position])
        compared = _compared(logits, next(drawn_nodes(row, Draft.empty(1), 0)), tokens, tolerance)
        tolerance /= begun.request.sampling.temperature or 1.0
    margin = float("inf")  # one of them ended where the other went on: never a matter of rounding
    if len(tokens) == 2:
        margin = max(min(float(scores.max() - scores[each]) for scores in compared) for each in tokens)
    return Difference(ours.request_id, position, token, greedy_token, margin, tolerance, ours.sample)


def _compared(logits: torch.Tensor, node: Node, tokens: Seq[int], tolerance: float) -> list[torch.Tensor]:
    """Scores that may have been compared at `node`, ``[vocab]`` each, also with cut-offs that rounding moved.

    Top-k and the like cut sharply, so that a token at the edge is in or out by the last bits of logits.
    """
    whole = replace(node, params=replace(node.params, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0))
    every = scores_of(logits[None], [whole])[0]
    order = processed_at(logits[None], [whole])[0]
    compared = [scores_of(logits[None], [node])[0]]
    itself = {token: (torch.arange(len(order), device=order.device) == token).double() for token in tokens}
    orders = [order]
    if node.params.typical_p < 1:
        rest = processed_at(logits[None], [replace(node, params=replace(node.params, typical_p=1.0))])[0]
        surprise = -rest.log_softmax(0)
        orders.append(-(surprise - (rest.softmax(0) * surprise).nansum()).abs())  # it takes the largest first
    for (token, other), ranks in product(permutations(tokens, 2), orders):
        raised = (ranks <= ranks[token]).double() * 2 - 1
        # Each way to keep the token, alone or with the other one, and to cut it off, from above or from below.
        for moves in (raised, itself[token] - itself[other], -raised, -itself[token]):
            kept = scores_of((logits + tolerance * moves)[None], [node])[0].isfinite()
            compared.append(every.masked_fill(~kept, -float("inf")))
    return compared


@torch.inference_mode()
def _logits_after(tokens: tuple[int, ...], runner: ModelRunner) -> torch.Tensor:
    """The target's logits after `tokens`, ``[vocab]`` in float64."""
    sequence = Row(Request("emssd.decoding.check", tokens, max_new_tokens=1))
    packed = pack([sequence], Draft.empty(1))
    try:
        return runner.run(packed).logits[0].double()
    finally:
        runner.release([sequence.request_id])
