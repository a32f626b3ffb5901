"""The rules of a draft: what a drafter returns is copied and held to its interface."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import index

import torch

from emssd.drafting.draft import Draft
from emssd.errors import DraftError
from emssd.sequences import Batch

__all__ = ["check_draft", "check_ids", "own_draft"]


def check_draft(draft: Draft, batch: Batch, budget: Seq[int], vocab_size: int) -> None:
    """Hold a drafter to its interface.

    Raises:
        DraftError: token ids that are no flat int64 tensor, wrong number of rows, more than the budget, a tree, or,
            where they lie on the host, ids outside the vocabulary.
    """
    if draft.token_ids.dtype != torch.int64 or draft.token_ids.ndim != 1:
        raise DraftError(
            f"its token_ids are {draft.token_ids.dtype} of {draft.token_ids.ndim} dimensions; "
            f"give one int64 tensor of all rows' tokens"
        )
    if draft.num_rows != len(batch) or draft.indptr[0] != 0 or draft.indptr[-1] != draft.token_ids.numel():
        raise DraftError(
            f"its draft has {draft.num_rows} rows over {draft.token_ids.numel()} tokens (indptr {draft.indptr}), "
            f"but the batch has {len(batch)} rows; return one chain, possibly empty, per row"
        )
    for sequence, length, limit in zip(batch, draft.lengths, budget, strict=True):
        if not 0 <= length <= limit:
            raise DraftError(
                f"it drafted {length} tokens for request {sequence.request_id!r} with a budget of {limit}; "
                f"draft at most budget[row] tokens"
            )
    if not draft.is_chain:
        raise DraftError("it drafted a token tree, and only chains are verified so far; draft one chain per row")
    if draft.on_host:
        check_ids(draft.token_ids.tolist(), vocab_size)


def own_draft(draft: Draft, batch: Batch, budget: Seq[int], vocab_size: int) -> Draft:
    """A copy of `draft` that nobody else can write to, held to the interface; see `check_draft`.

    Raises:
        DraftError: it is no `Draft`, or breaks a rule.
    """
    if not isinstance(draft, Draft):
        raise DraftError(f"it returned a {type(draft).__name__}; return an emssd.drafting.Draft")
    if not isinstance(draft.token_ids, torch.Tensor):
        raise DraftError(f"its token_ids are a {type(draft.token_ids).__name__}; give one int64 tensor")
    if draft.token_ids.is_meta:
        raise DraftError("its token_ids are on the device meta, where tensors hold nothing; give ids")
    own = Draft(
        token_ids=draft.token_ids.clone(),
        indptr=tuple(map(index, draft.indptr)),
        parents=None if draft.parents is None else tuple(map(index, draft.parents)),
    )
    check_draft(own, batch, budget, vocab_size)
    return own


def check_ids(token_ids: Seq[int], vocab_size: int) -> None:
    """Hold a drafter to the vocabulary; its ids on a device are checked when verification brings them to the host.

    Raises:
        DraftError: an id is outside of it.
    """
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low < 0 or high >= vocab_size:
        raise DraftError(
            f"it drafted token id {low if low < 0 else high}, outside the target's vocabulary "
            f"of {vocab_size}; ids must be in 0..{vocab_size - 1}"
        )
