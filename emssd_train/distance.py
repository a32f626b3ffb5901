"""The distance of a drafter from its target: the loss that all kinds share, depth by depth."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F

__all__ = ["choosable", "divergence", "weighted"]

_DECAY = 0.8  # of the weight of each further depth, as in the code of EAGLE's and of Medusa's authors


def choosable(logits: torch.Tensor, target_ids: torch.Tensor | None) -> torch.Tensor:
    """``[...]`` bool: whether the target's own choice is a token that can be drafted.

    Args:
        logits: ``[..., vocab]`` of the target.
        target_ids: of the tokens that can be drafted; ``None`` for all.
    """
    known = logits.new_ones(logits.shape[-1], dtype=torch.bool)
    if target_ids is not None:
        known = torch.zeros_like(known).index_fill_(0, target_ids, True)
    return known[logits.argmax(-1)]


def divergence(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean Kullback-Leibler divergence of what ``logits [t, vocab]`` say from what ``wanted [t, vocab]`` say."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    is_, should = logits.to(wide).log_softmax(-1), wanted.to(wide).log_softmax(-1)
    return F.kl_div(is_, should, reduction="batchmean", log_target=True)


def weighted(losses: Seq[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The result of a loss module, for the training loop.

    Args:
        losses: one for each drafted depth.

    Returns:
        ``loss``, their weighted sum, and ``losses [depth]`` without weights.
    """
    stacked = torch.stack(list(losses))
    weights = _DECAY ** torch.arange(len(losses), device=stacked.device)
    return {"loss": (stacked * weights).sum(), "losses": stacked.detach()}
