"""Training-time test: a head is trained on its own outputs, as it will read them while it drafts.

Li et al. 2025, EAGLE-3, arXiv 2503.01840, §3.2. Pair ``j`` is the embedding of token ``j + 1`` beside a feature of
token ``j``, and the output after it is for token ``j + 2``. Pass 0 reads the target's features at every pair, and its
outputs are for first drafted tokens. Pass `k` reads, at every pair, what pass ``k - 1`` gave for the pair before:
its outputs are for the next drafted tokens. A draft after pair ``s`` goes through pair ``s + k`` in pass `k`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from emssd_eagle3.head import Eagle3Head
from torch import nn

from emssd.drafters.heads.target import Project
from emssd_train.distance import choosable, divergence, weighted
from emssd_train.teacher import Teacher

__all__ = ["UnrolledLoss", "unroll"]


class _ChainAttention:
    """Attention of all passes over `b` sequences of `m` pairs.

    In pass `k`, pair ``j`` sees what it would while drafting: of pass 0 the pairs up to ``j - k``, which are committed
    there; and the drafted ones, pair ``j - k + i`` of each pass ``i`` from 1 to `k`. For pairs below `k`, which stand
    for no draft, this gives numbers without a meaning.

    Args:
        head: whose layers attend.
        shape: ``(b, m)``.
    """

    def __init__(self, head: Eagle3Head, shape: tuple[int, int]) -> None:
        self._specs, self._shape = head.specs, shape
        self._seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in head.specs]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        spec, seen, num_pairs = self._specs[layer], self._seen[layer], self._shape[1]
        groups = spec.num_qo_heads // spec.num_kv_heads
        by_head = [each.view(*self._shape, *each.shape[1:]).transpose(1, 2) for each in (query, key, value)]
        query, (key, value) = by_head[0] * spec.scale, (each.repeat_interleave(groups, 1) for each in by_head[1:])
        seen.append((key, value))
        step = len(seen) - 1
        place = torch.arange(num_pairs, device=query.device)
        committed = query @ seen[0][0].mT
        scores = [committed.masked_fill(place > place[:, None] - step, -math.inf)]
        drafted = [(key.roll(step - i, 2), value.roll(step - i, 2)) for i, (key, value) in enumerate(seen) if i]
        scores += [(query * key).sum(-1, keepdim=True) for key, _ in drafted]
        weights = torch.cat(scores, dim=-1).softmax(-1)
        out = weights[..., :num_pairs] @ seen[0][1]
        for i, (_, value) in enumerate(drafted):
            out = out + weights[..., num_pairs + i, None] * value
        return out.transpose(1, 2).flatten(0, 1)


def unroll(head: Eagle3Head, embeds: torch.Tensor, features: torch.Tensor, num_passes: int) -> Iterator[torch.Tensor]:
    """The outputs of each pass, ``[b, m, hidden_size]``; those of pass `k` at pairs below `k` mean nothing.

    Args:
        head: to run.
        embeds: ``[b, m, hidden_size]`` of token ``j + 1`` at pair ``j``.
        features: ``[b, m, hidden_size]`` of token ``j``, from the target.
        num_passes: how many, the first one included.
    """
    positions = torch.arange(embeds.shape[1], device=embeds.device).expand(embeds.shape[:2])
    attend = _ChainAttention(head, (embeds.shape[0], embeds.shape[1]))
    for _ in range(num_passes):
        outputs = head(torch.cat([embeds, features], dim=-1), positions, attend)
        yield outputs
        features = outputs.roll(1, 1)


class UnrolledLoss(nn.Module):
    """The distance of a head from the target, pass by pass, as a module for a training loop.

    The loss of a pass is the mean divergence of the head's distribution from the target's, over the tokens that the
    head can draft. It is taken where a draft may be: after the first new token of a text, up to its end; and not where
    the target's own choice is a token that the head cannot draft.

    Args:
        head: that is trained.
        teacher: the target.
        num_passes: weights fall by a constant factor with each.
    """

    def __init__(self, head: Eagle3Head, teacher: Teacher, num_passes: int) -> None:
        super().__init__()
        self.head = head
        self._teacher, self._num_passes = teacher, num_passes

    def forward(
        self, input_ids: torch.Tensor, num_prompt: torch.Tensor, num_tokens: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The loss of a batch.

        Args:
            input_ids: ``[b, n]`` texts, padded on the right.
            num_prompt: ``[b]`` tokens of each prompt; fewer, if something is to be learnt from it.
            num_tokens: ``[b]`` tokens of each text.

        Returns:
            ``loss``, and ``losses [num_passes]`` without weights.
        """
        lesson, head = self._teacher(input_ids), self.head
        dtype = head.norm.weight.dtype
        features = head.features(lesson.hidden[:, :-1].to(dtype))
        embeds, logits = lesson.embeds[:, 1:].to(dtype), lesson.logits[:, 1:]
        place = torch.arange(embeds.shape[1], device=embeds.device)
        ends, begins = place + 2 < num_tokens[:, None], num_prompt[:, None] - 1
        known = choosable(logits, head.target_ids)
        losses = []
        for step, outputs in enumerate(unroll(head, embeds, features, self._num_passes)):
            counted = ends & (place - step >= begins) & known
            losses.append(self._divergence(outputs[counted], logits[counted]))
        return weighted(losses)

    def _divergence(self, outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The mean Kullback-Leibler divergence of ``outputs [t, hidden_size]`` from logits ``wanted [t, vocab]``."""
        if not len(outputs):
            return outputs.sum()
        if self.head.target_ids is not None:
            wanted = wanted[:, self.head.target_ids]
        return divergence(self.head.logits(outputs, self._project), wanted)

    @property
    def _project(self) -> Project:
        borrowed = self._teacher.borrowed
        return lambda hidden: borrowed.project(hidden.to(borrowed.dtype))
