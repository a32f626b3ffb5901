"""`ResidualRule`: block and traversal verification for the rows of a step that ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from emssd.decoding.choosing import drawn_nodes
from emssd.decoding.verify import SharedNoise
from emssd.drafting import Draft
from emssd.drafting.rule import LawReport, Verified
from emssd.model import ModelRunner
from emssd.sampling.choice import probabilities
from emssd.sequences import Generation, Row
from emssd_residual.distributions import uniforms
from emssd_residual.drafts import Drawn
from emssd_residual.law import check_distribution
from emssd_residual.rules import verify_deterministic, verify_traversal

__all__ = ["ResidualRule"]


class ResidualRule(SharedNoise):
    """Verifies a row that was drawn with a known ``q`` by traversal, and rows of other methods by shared noise.

    In a draft without a ``q``, the tokens that the target draws itself are accepted. They are not drawn with the noise
    of `coupled` sampling. A drafter can compute that noise beforehand, so whether it gives a ``q`` could depend on it.

    On a GPU, the host waits several times for each node.
    """

    def verify(
        self, logits: torch.Tensor, rows: Seq[Row], draft: Draft, candidates: torch.Tensor | None = None
    ) -> list[Verified]:
        verified, draft = super().verify(logits, rows, draft, candidates), draft.within(logits.shape[1])
        for number, result in enumerate(verified):
            params = result.row.request.sampling
            if params is None or not params.is_residual:
                continue
            nodes, first = list(drawn_nodes(result.row, draft, number)), draft.indptr[number] + number
            target = probabilities(logits[first : first + len(nodes)], nodes)
            numbers = uniforms(nodes[0].key, "verify", len(result.row.tokens))
            tokens, tree = draft.tokens(number), draft.tree(number)
            extra = None if draft.extra is None else draft.extra[number]
            if isinstance(extra, Drawn):
                verdict = verify_traversal(target, extra.q, tokens, tree, numbers)
            else:
                verdict = verify_deterministic(target, (), tokens, tree, numbers)
            result.accepted, result.new_tokens = verdict.path, [*(tokens[node] for node in verdict.path), verdict.token]
            for node, token in zip((-1, *verdict.path), result.new_tokens, strict=True):
                result.target_ids[node + 1] = token
        return verified

    def check(self, generations: Seq[Generation], runner: ModelRunner, rows: Mapping[str, Row]) -> LawReport:
        return check_distribution(generations, runner, rows)
