"""`check=plain`: compares a run with plain decoding, token by token, and explains every difference."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import product, zip_longest

import torch

from emssd.decoding.choosing import drawn_nodes
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.drafting.rule import LawReport
from emssd.model import ModelRunner
from emssd.sampling.choice import Node, processed_at, scores_of
from emssd.sequences import Generation, Request, Row

__all__ = ["CheckReport", "Difference", "compare"]

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
        margin: by how much the target's logits of the two differ after the common prefix; in a sampled row, processed
            logits with noise, where a token at a cut-off such as top-p counts as kept and as dropped.
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
    law: LawReport | None = None

    @property
    def ties(self) -> list[Difference]:
        """Rows whose first difference is a numerical tie."""
        return [difference for difference in self.differences if difference.is_tie]

    @property
    def true_differences(self) -> list[Difference]:
        """Rows whose first difference is none: a bug."""
        return [difference for difference in self.differences if not difference.is_tie]


def compare(
    generations: Seq[Generation], plain: Seq[Generation], runner: ModelRunner, rows: Mapping[str, Row] | None = None
) -> CheckReport:
    """Compare `generations` with `plain`, row by row.

    A difference is judged by one fresh run of the target over the common prefix, by `runner`, which must be idle.

    Args:
        rows: by request id, as it began, which says how both chose their tokens; greedily by default.
    """
    pairs = [pair for pair in zip(generations, plain, strict=True) if pair[0].token_ids != pair[1].token_ids]
    rows = rows or {}
    differences = [_first_difference(ours, theirs, runner, rows.get(ours.request_id)) for ours, theirs in pairs]
    return CheckReport(len(generations) - len(pairs), tuple(differences))


def _first_difference(ours: Generation, theirs: Generation, runner: ModelRunner, begun: Row | None) -> Difference:
    pairs = enumerate(zip_longest(ours.token_ids, theirs.token_ids))
    position, (token, greedy_token) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    prefix = (*ours.prompt_ids, *ours.token_ids[:position])
    logits = _logits_after(prefix, runner)
    tolerance = TIE_TOLERANCE[runner.precision] * float(logits.abs().max())
    tokens = [one for one in (token, greedy_token) if one is not None]
    scores, certain, possible = logits, *[torch.ones_like(logits, dtype=torch.bool)] * 2
    if begun is not None and begun.request.sampling is not None:
        row = Row(replace(begun.request, sample=ours.sample), grammar=begun.grammar)
        row.extend(ours.token_ids[:position])
        scores, certain, possible = _cut(logits, next(drawn_nodes(row, Draft.empty(1), 0)), tokens, tolerance)
        tolerance /= begun.request.sampling.temperature or 1.0
    margin = float("inf")  # one of them ended where the other went on: never a matter of rounding
    if len(tokens) == 2 and all(possible[tokens]):
        best = max(scores[certain].tolist(), default=-float("inf"))
        margin = max(0.0, best - float(scores[tokens].min()))
    return Difference(ours.request_id, position, token, greedy_token, margin, tolerance, ours.sample)


def _cut(
    logits: torch.Tensor, node: Node, tokens: Seq[int], tolerance: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores without cut-offs at `node`, and the tokens that top-k and the like certainly, or possibly, keep.

    These cut sharply: where logits are within `tolerance` of a cut-off, their last bits decide. So logits are moved by
    that much: for each of `tokens` once in favour of it, once in favour of the tokens above it, and once against it.
    """
    whole = replace(node, params=replace(node.params, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0))
    ranks = [processed_at(logits[None], [whole])[0]]
    if node.params.typical_p < 1:  # it keeps the least unexpected
        rest = processed_at(logits[None], [replace(node, params=replace(node.params, typical_p=1.0))])[0]
        surprise = -rest.log_softmax(0)
        ranks.append(-(surprise - (rest.softmax(0) * surprise).nansum()).abs())
    moves = [torch.zeros_like(logits)]
    for token, rank in product(tokens, ranks):
        is_below, is_itself = (rank <= rank[token]).double(), torch.zeros_like(logits)
        is_itself[token] = 1
        moves += [tolerance * (2 * is_below - 1), tolerance * (1 - 2 * is_below), -tolerance * is_itself]
    kept = torch.stack([scores_of((logits + move)[None], [node])[0].isfinite() for move in moves])
    return scores_of(logits[None], [whole])[0], kept.all(dim=0), kept.any(dim=0)


@torch.inference_mode()
def _logits_after(tokens: tuple[int, ...], runner: ModelRunner) -> torch.Tensor:
    """The target's logits after `tokens`, ``[vocab]`` in float64."""
    row = Row(Request("emssd.decoding.check", tokens, max_new_tokens=1))
    try:
        return runner.run(pack([row], Draft.empty(1))).logits[0].double()
    finally:
        runner.release([row.request_id])
