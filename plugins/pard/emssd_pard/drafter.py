"""Drafts chains for the whole batch in one pass of a draft model that fills in masks.

An et al. 2025, PARD, arXiv 2504.18583, §3.1.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from emssd.drafters import (
    DynamicShape,
    GrowingRow,
    ModelDrafter,
    SlotDrafter,
    check_at_least_one,
    load_draft_model,
    pack,
)
from emssd.drafting import Draft, DrafterContext
from emssd.errors import ConfigError
from emssd.model import ModelRunner
from emssd_pard import PardConfig
from emssd_pard.masks import config_of, mask_token

__all__ = ["PardDrafter"]


class PardDrafter(SlotDrafter, ModelDrafter):
    """Drafts chains with one pass for all of their tokens.

    A row that may draft ``k`` tokens computes what the draft model has not cached, and then ``k - 1`` masks, with
    causal attention. The logits after its newest token are for the first draft, those after mask ``j`` for draft
    ``j + 1``. So each token is chosen from its own position's distribution, whatever was drafted before it, and with
    the noise of that position. The KV of masks is dropped at once: the next pass computes the tokens that came there.

    Args:
        runner: the draft model with its KV cache.
        vocab_size: the target's; ids beyond it are never drafted.
        mask_token_id: below the draft model's own vocabulary size.
        num_speculative_tokens: the most tokens per row and step.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, mask_token_id: int, num_speculative_tokens: int) -> None:
        check_at_least_one(num_speculative_tokens=num_speculative_tokens)
        shape = DynamicShape(num_speculative_tokens, num_speculative_tokens, 1)
        super().__init__(runner, vocab_size, shape)
        self._mask = mask_token_id

    @classmethod
    def load(cls, config: PardConfig, context: DrafterContext) -> PardDrafter:
        """Load the model of `config`. Raises ConfigError: it does not share the target's vocabulary, or was not trained
        to draft in parallel.
        """
        if config.path is None:
            raise ConfigError("drafter=pard drafts with a model that was trained for it: give drafter.path=FOLDER")
        runner = load_draft_model(config.path, context)
        mask = mask_token(config.path, config_of(config.path), runner.vocab_size, config.mask_token_id)
        return cls(runner, context.vocab_size, mask, config.num_speculative_tokens)

    def slots(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        masks = Draft.from_chains([self._mask] * (row.tree.depth - 1) for row in rows)
        logits = self._columns(self._runner.run(pack(rows, masks)).logits)
        self._keep([row.request_id for row in rows], [len(row.tokens) for row in rows])
        return logits

    def finish(self, rows: Seq[GrowingRow]) -> None:
        pass  # what is accepted changes no KV
