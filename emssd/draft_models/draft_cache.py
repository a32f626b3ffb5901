"""`DraftCache`: the KV cache of a drafter's model, beside the target's."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq

import torch

from emssd.attention import AttentionBackend, Kept, StepPlan
from emssd.model import ModelRunner

__all__ = ["DraftCache", "fed"]


class DraftCache:
    """The KV cache of a drafter's model.

    Args:
        caches: of the model's parts, which all compute the same tokens.

    Attributes:
        held: by request id, how many tokens have KV that stays.
    """

    def __init__(self, *caches: AttentionBackend | ModelRunner) -> None:
        self._caches, self._fixed = caches, dict[Hashable, torch.Tensor]()
        self.held: dict[str, int] = {}

    def in_place(self, name: Hashable, values: torch.Tensor, size: int) -> torch.Tensor:
        """``values [n, …]`` where all recorded steps of this `name` read them, ``[size, …]``; zeros after them."""
        if name not in self._fixed:
            self._fixed[name] = values.new_zeros(size, *values.shape[1:])
        held = self._fixed[name]
        held[: len(values)] = values
        held[len(values) :] = 0
        return held

    def commit(self, kept: Kept) -> None:
        """After a draft or its verification, drop the KV of other tokens."""
        self.held.update(zip(kept.request_ids, kept.kv_lens, strict=True))
        for cache in self._caches:
            cache.commit(kept)

    def release(self, request_ids: Iterable[str]) -> None:
        """Free all KV of these requests. Unknown ids are no error."""
        request_ids = list(request_ids)
        for cache in self._caches:
            cache.release(request_ids)
        for request_id in request_ids:
            self.held.pop(request_id, None)

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        """Whether there is room for these sequences, each at this many tokens, and no others."""
        return all(cache.fits(kv_lens) for cache in self._caches)

    def with_room(self, wanted: Seq[tuple[str, int]]) -> list[bool]:
        """Return for each row whether there is room for it, beside those that are held; the first come first.

        Args:
            wanted: request id of each row, and at how many tokens it is to be, at least 1.
        """
        if self.fits({**self.held, **dict(wanted)}):
            return [True] * len(wanted)
        taken, fitting = dict(self.held), []
        for name, kv_len in wanted:
            more = taken | {name: kv_len}
            fitting.append(self.fits(more))
            taken = more if fitting[-1] else taken
        return fitting


def fed(plan: StepPlan, values: torch.Tensor) -> torch.Tensor:
    """``values [nnz, ...]`` of the packed tokens in the order of the fed ones, ``[b * n, ...]``; zeros for padding."""
    num_fed = plan.input_ids.numel()
    if plan.token_index is None and num_fed == len(values):
        return values
    padded = values.new_zeros(num_fed, *values.shape[1:])
    padded[slice(len(values)) if plan.token_index is None else plan.token_index] = values
    return padded
