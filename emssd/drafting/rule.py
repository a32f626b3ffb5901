"""`VerificationRule`: decides which drafted tokens are accepted, and draws the token after them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from emssd.drafting.draft import Draft
from emssd.model import ModelRunner
from emssd.sequences import Generation, Row, TokenLogprob

__all__ = ["LawReport", "VerificationRule", "Verified"]


@dataclass(slots=True)
class Verified:
    """The result of verifying the draft of one row.

    Attributes:
        drafted: ``[n]`` the drafted token ids, now on the host.
        accepted: the accepted draft nodes in order, ``range(n)`` for a chain.
        new_tokens: the accepted tokens followed by one token of the target's own: *recovered* where a draft token was
            rejected, *bonus* where all were accepted. Its length is the acceptance length τ.
        target_ids: ``[1 + n]`` the target's choice after the row's newest token, then after each node of its draft.
        candidates: ``[1 + n]`` at the same places the target's best tokens, if a drafter wants them.
        logprobs: of `new_tokens`, if the request asks for them.
    """

    row: Row
    drafted: list[int]
    accepted: Seq[int]
    new_tokens: list[int]
    target_ids: list[int]
    candidates: list[list[int]] | None = None
    logprobs: Seq[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class LawReport:
    """The result of a test whether the tokens of a run have the law of plain decoding.

    Attributes:
        is_right: whether nothing speaks against it.
        described: the result for people, in lines.
        metrics: its figures, as `check.law` of a run's metrics.
    """

    is_right: bool
    described: tuple[str, ...]
    metrics: Mapping[str, Any]


class VerificationRule(ABC):
    """Verifies the drafts of a step. It keeps no state, so that a step can be done again."""

    @abstractmethod
    def verify(
        self, logits: torch.Tensor, rows: Seq[Row], draft: Draft, candidates: torch.Tensor | None = None
    ) -> list[Verified]:
        """Verify the draft of each row, ``[B]``.

        Args:
            logits: ``[B + num_draft, vocab]``: of each row the logits after its newest token, then after each of its
                drafted tokens.
            candidates: ``[B + num_draft, num_candidates]`` int64, the target's best tokens at the same places, if a
                drafter wants to know.
        """

    def check(self, generations: Seq[Generation], runner: ModelRunner, rows: Mapping[str, Row]) -> LawReport | None:
        """Test the law of texts that depend on drafts; ``None`` if none does, so that they can be compared.

        Args:
            runner: the target, idle.
            rows: by request id, as they began.
        """
        return None
