"""Plugin `drafter=pard`: a language model that was trained to draft all tokens of a chain in one pass.

An et al. 2025, "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation", arXiv 2504.18583.
"""

from __future__ import annotations

from dataclasses import dataclass

from emssd.draft_models import load_draft_model
from emssd.drafting import Drafter, DrafterContext
from emssd.errors import ConfigError
from emssd.errors.ranges import AtLeastOne, AtLeastZero
from emssd.hooks import DrafterSpec, offering

__all__ = ["PardConfig"]


@dataclass
class PardConfig:
    """Options of `drafter=pard`.

    A draft costs one pass of the draft model, however long it is, with one token for each drafted one.

    Attributes:
        path: folder or hub id of the draft model, which has the target's tokenizer and was trained as PARD says.
        num_speculative_tokens: the most tokens drafted per row and step.
        mask_token_id: what stands in the place of tokens that are not known yet. It must be the one that the draft
            model was trained with: another changes no token, but hardly anything is accepted. ``null`` takes
            ``pard_token`` of the model's config.json.
    """

    path: str | None = None
    num_speculative_tokens: AtLeastOne = 8
    mask_token_id: AtLeastZero | None = None


def _build(config: PardConfig, context: DrafterContext) -> Drafter:
    from emssd_heads.pard.drafter import PardDrafter, mask_token

    if config.path is None:
        raise ConfigError("drafter=pard drafts with a model that was trained for it: give drafter.path=FOLDER")
    runner = load_draft_model(config.path, context)
    mask = mask_token(config.path, runner.vocab_size, config.mask_token_id)
    return PardDrafter(runner, context.vocab_size, mask, config.num_speculative_tokens)


emssd_drafters = offering(DrafterSpec("pard", PardConfig, _build, reads=("pard",)))
