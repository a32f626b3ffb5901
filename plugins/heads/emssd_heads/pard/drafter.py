"""Drafts chains for the whole batch in one pass of a draft model that fills in masks.

An et al. 2025, PARD, arXiv 2504.18583, §3.1.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from emssd.draft_models import DynamicShape, GrowingRow, ModelDrafter, SlotDrafter, pack
from emssd.drafting import Draft
from emssd.errors import ConfigError
from emssd.model import ModelRunner

__all__ = ["PardDrafter", "mask_token"]

_NAMES = ("pard_token", "ptd_token_id")  # of the authors, and what vLLM reads beside it


class PardDrafter(SlotDrafter, ModelDrafter):
    """Drafts chains with one pass for all of their tokens.

    A row that may draft ``k`` tokens computes what the draft model has not cached, and then ``k - 1`` masks, with
    causal attention. The logits after its newest token are for the first draft, those after mask ``j`` for draft
    ``j + 1``. So each token is chosen from its own position's distribution, whatever was drafted before it, and with
    the noise of that position. The KV of masks is dropped at once: the next pass computes the tokens that came there.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, mask_token_id: int, num_speculative_tokens: int) -> None:
        shape = DynamicShape(num_speculative_tokens, num_speculative_tokens, 1)
        super().__init__(runner, vocab_size, shape)
        self._mask = mask_token_id

    def slots(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        masks = Draft.from_chains([self._mask] * (row.tree.depth - 1) for row in rows)
        logits = self._columns(self._runner.run(pack(rows, masks)).logits)
        self._keep([row.request_id for row in rows], [len(row.tokens) for row in rows])
        return logits

    def finish(self, rows: Seq[GrowingRow]) -> None:
        pass  # what is accepted changes no KV


def mask_token(path: str, vocab_size: int, chosen: int | None) -> int:
    """The token that the draft model at `path` was trained to fill in, by its config, unless it is `chosen`."""
    from transformers import PretrainedConfig

    local = Path(path).expanduser()
    config = PretrainedConfig.get_config_dict(str(local) if local.is_dir() else path)[0]
    if config.get("spd_type") == "pard2" or any(name.startswith("pard2") for name in config):
        raise ConfigError(
            f"cannot draft with {path!r}: it is a PARD-2 model, which reads hidden states of its target, and "
            f"drafter=pard has none to give; take a PARD model"
        )
    named = {name: config[name] for name in _NAMES if config.get(name) is not None}
    if chosen is not None:
        what, token = f"drafter.mask_token_id is {chosen}", chosen
    elif named:
        name, token = next(iter(named.items()))
        what = f"{name} in its config.json is {token!r}"
    else:
        raise ConfigError(
            f"cannot draft with {path!r}: its config.json has no {_NAMES[0]}, so nothing says that it was trained to "
            f"draft in parallel; take drafter=draft_model, or give drafter.mask_token_id if you know it"
        )
    if type(token) is not int or not 0 <= token < vocab_size:
        raise ConfigError(f"cannot draft with {path!r}: {what}, and its vocabulary has the ids 0 to {vocab_size - 1}")
    return token
