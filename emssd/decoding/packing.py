"""Concatenates the new tokens of all rows into one ragged input, without padding (paper §3.2, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Protocol

import torch

from emssd.attention import PackedInputs
from emssd.attention.packed import Drafted
from emssd.attention.trees import Parents, depths, is_chain
from emssd.drafting import Draft
from emssd.metrics.timing import phase

__all__ = ["Row", "pack", "pack_nodes"]


class Row(Protocol):
    """What `pack` reads of a sequence."""

    @property
    def request_id(self) -> str: ...
    @property
    def tokens(self) -> Seq[int]: ...
    @property
    def num_cached(self) -> int: ...


@phase("plan")
def pack(rows: Iterable[Row], draft: Draft, prefills: Iterable[tuple[Row, int]] = ()) -> PackedInputs:
    """Row ``i`` becomes ``tokens[num_cached:]`` followed by its draft: prefill and decoding are one path.

    Args:
        rows: sequences, each with at least one token that is not cached.
        draft: trees for these rows.
        prefills: further rows, of each the number of tokens behind the cached ones; no logits of theirs are wanted.
    """
    request_ids: list[str] = []
    input_ids: list[int] = []
    position_ids: list[int] = []
    qo_indptr = [0]
    kv_lens: list[int] = []
    logit_rows: list[int] = []
    places: list[int] = []  # of drafted tokens
    trees: list[tuple[int, ...]] = []
    for index, (row, num_drafted) in enumerate(zip(rows, draft.lengths, strict=True)):
        tokens, num_cached = row.tokens, row.num_cached
        num_tokens, tree = len(tokens), () if draft.parents is None else _branches(draft.tree(index))
        input_ids.extend(tokens[num_cached:])
        start = len(input_ids)
        input_ids.extend([0] * num_drafted)  # filled in below: drafted ids may live on the device
        position_ids.extend(range(num_cached, num_tokens + num_drafted - len(tree)))
        position_ids.extend(num_tokens - 1 + depth for depth in depths(tree))
        places.extend(range(start, start + num_drafted))
        logit_rows.extend(range(start - 1, start + num_drafted))
        request_ids.append(row.request_id)
        qo_indptr.append(len(input_ids))
        kv_lens.append(num_tokens + num_drafted)
        trees.append(tree)
    for row, num_tokens in prefills:
        kv_len = row.num_cached + num_tokens
        input_ids.extend(row.tokens[row.num_cached : kv_len])
        position_ids.extend(range(row.num_cached, kv_len))
        request_ids.append(row.request_id)
        qo_indptr.append(len(input_ids))
        kv_lens.append(kv_len)
        trees.append(())
    if draft.on_host:
        for place, token in zip(places, draft.token_ids.tolist(), strict=True):
            input_ids[place] = token
    return PackedInputs(
        request_ids=tuple(request_ids),
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        position_ids=torch.tensor(position_ids, dtype=torch.int64),
        qo_indptr=tuple(qo_indptr),
        kv_lens=tuple(kv_lens),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        trees=tuple(trees) if any(trees) else None,
        drafted=None if draft.on_host else Drafted(torch.tensor(places, dtype=torch.int64), draft.token_ids),
    )


def pack_nodes(
    request_ids: Seq[str],
    token_ids: torch.Tensor,
    lengths: Seq[int],
    kv_lens: Seq[int],
    trees: Seq[Parents] | None = None,
) -> PackedInputs:
    """Drafted tokens alone, behind others that are cached: the step of a drafter that decodes with a model of its own.

    Args:
        request_ids: ``[B]``.
        token_ids: ``[nnz]`` int64, on any device.
        lengths: ``[B]`` how many of them each row has.
        kv_lens: ``[B]`` the KV length of each row with them.
        trees: ``[B]`` parents of all drafted tokens of a row, those that are cached first; ``None`` for chains.
    """
    position_ids: list[int] = []
    branches = [()] * len(request_ids) if trees is None else [_branches(tree) for tree in trees]
    for length, kv_len, tree in zip(lengths, kv_lens, branches, strict=True):
        origin = kv_len - len(tree) - 1
        position_ids.extend(
            (origin + depth for depth in depths(tree)[-length:]) if tree else range(kv_len - length, kv_len)
        )
    num_tokens = len(position_ids)
    on_host = token_ids.device.type == "cpu"
    return PackedInputs(
        request_ids=tuple(request_ids),
        input_ids=token_ids if on_host else torch.zeros(num_tokens, dtype=torch.int64),
        position_ids=torch.tensor(position_ids, dtype=torch.int64),
        qo_indptr=(0, *accumulate(lengths)),
        kv_lens=tuple(kv_lens),
        logit_rows=torch.arange(num_tokens),
        trees=tuple(branches) if any(branches) else None,
        drafted=None if on_host else Drafted(torch.arange(num_tokens), token_ids),
    )


def _branches(tree: Parents) -> tuple[int, ...]:
    """A tree that is a chain needs no mask."""
    return () if is_chain(tree) else tuple(tree)
