"""Passes of one token for each row that are planned beforehand, and run as one: the loop over the tokens of chains."""

from __future__ import annotations

from collections.abc import Callable

import torch

from emssd.attention import AttentionBackend, PackedInputs, StepPlan
from emssd.model.program import Chain

__all__ = ["in_passes", "likeliest"]


def likeliest(logits: torch.Tensor, width: int, scale: float) -> torch.Tensor:
    """``[2, n, width]`` float64 of ``logits [n, vocab]`` times `scale`: the most probable ids, and the logarithms of
    how probable they are; zeros if `scale` is 0, where nobody asks. The host waits for nothing.
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale if scale else logits
    values, ids = scaled.max(dim=1, keepdim=True) if width == 1 else scaled.topk(width, dim=1)
    shares = values - scaled.logsumexp(dim=1, keepdim=True) if scale else torch.zeros_like(values)
    return torch.stack([ids.double(), shares.double()])


def in_passes(
    backend: AttentionBackend,
    packed: PackedInputs,
    chain: Chain,
    given: Callable[[StepPlan], torch.Tensor] | None,
    one_pass: Callable[[StepPlan, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor | None:
    """Plan all passes, and run them as one; ``None`` if the backend plans each by itself.

    Args:
        packed, chain: see `emssd.model.runner.ModelRunner.run_passes`.
        given: what the first pass reads, at an address that stays; ``None`` for the token ids of its plan.
        one_pass: of a plan and what the pass reads, ``[2, n]`` the likeliest tokens, and what the next pass reads.
    """
    plans = backend.plan_passes(packed, chain.lengths)
    if not plans:
        return None
    first = plans[0].input_ids[0] if given is None else given(plans[0])

    def compute() -> torch.Tensor:
        found, reads = list[torch.Tensor](), first
        for plan in plans:
            both, reads = one_pass(plan, reads)
            found.append(both)
        return torch.stack(found, dim=1)

    found: torch.Tensor = compute() if plans[0].replay is None else plans[0].replay(compute)
    return found[..., : packed.num_rows]
