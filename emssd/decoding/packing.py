"""Concatenates the new tokens of all rows into one ragged input, without padding (paper §3.2, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from emssd.attention import PackedInputs
from emssd.attention.transfer import on_device
from emssd.drafting import Draft
from emssd.metrics.timing import phase

__all__ = ["Row", "pack", "pack_one"]


class Row(Protocol):
    """What `pack` reads of a sequence."""

    @property
    def request_id(self) -> str: ...
    @property
    def tokens(self) -> Seq[int]: ...
    @property
    def num_cached(self) -> int: ...


@phase("plan")
def pack(
    rows: Iterable[Row], draft: Draft, device: torch.device, prefills: Iterable[tuple[Row, int]] = ()
) -> PackedInputs:
    """Row ``i`` becomes ``tokens[num_cached:]`` followed by its draft: prefill and decoding are one path.

    Args:
        rows: sequences, each with at least one token that is not cached.
        draft: chains for these rows.
        device: where the model's inputs are wanted.
        prefills: further rows, of each the number of tokens behind the cached ones; no logits of theirs are wanted.
    """
    request_ids: list[str] = []
    input_ids: list[int] = []
    position_ids: list[int] = []
    qo_indptr = [0]
    kv_lens: list[int] = []
    logit_rows: list[int] = []
    draft_rows: list[int] = []
    for row, num_drafted in zip(rows, draft.lengths, strict=True):
        tokens, num_cached = row.tokens, row.num_cached
        kv_len = len(tokens) + num_drafted
        input_ids.extend(tokens[num_cached:])
        draft_start = len(input_ids)
        input_ids.extend([0] * num_drafted)  # filled in below: drafted ids may live on the device
        position_ids.extend(range(num_cached, kv_len))
        draft_rows.extend(range(draft_start, draft_start + num_drafted))
        logit_rows.extend(range(draft_start - 1, draft_start + num_drafted))
        request_ids.append(row.request_id)
        qo_indptr.append(len(input_ids))
        kv_lens.append(kv_len)
    for row, num_tokens in prefills:
        kv_len = row.num_cached + num_tokens
        input_ids.extend(row.tokens[row.num_cached : kv_len])
        position_ids.extend(range(row.num_cached, kv_len))
        request_ids.append(row.request_id)
        qo_indptr.append(len(input_ids))
        kv_lens.append(kv_len)
    if draft.on_host:
        for place, token in zip(draft_rows, draft.token_ids.tolist(), strict=True):
            input_ids[place] = token
        draft_rows = []
    ids = on_device(input_ids, device)
    if draft_rows:
        ids[on_device(draft_rows, device)] = draft.token_ids.to(device, non_blocking=True)
    return PackedInputs(
        request_ids=tuple(request_ids),
        input_ids=ids,
        position_ids=on_device(position_ids, device),
        qo_indptr=tuple(qo_indptr),
        kv_lens=tuple(kv_lens),
        logit_rows=on_device(logit_rows, device),
    )


def pack_one(request_ids: Seq[str], token_ids: torch.Tensor, positions: Seq[int]) -> PackedInputs:
    """One token per row, already on the device: the step of a drafter that decodes with a model of its own.

    Args:
        request_ids: ``[B]``.
        token_ids: ``[B]`` int64.
        positions: ``[B]`` host integers, the position of each token; all before it are cached.
    """
    device = token_ids.device
    return PackedInputs(
        request_ids=tuple(request_ids),
        input_ids=token_ids,
        position_ids=on_device(positions, device),
        qo_indptr=tuple(range(len(request_ids) + 1)),
        kv_lens=tuple(position + 1 for position in positions),
        logit_rows=torch.arange(len(request_ids), device=device),
    )
