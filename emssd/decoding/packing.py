"""Concatenates the new tokens of all rows into one ragged input, without padding (paper §3.2, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from emssd.attention import PackedInputs
from emssd.attention.packed import Drafted
from emssd.attention.tables import runs
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
    cached: list[int] = []
    known: list[int] = []  # tokens of each row that are not cached, without its draft
    known_ids: list[int] = []
    for row, _ in zip(rows, lengths := draft.lengths, strict=True):
        new = row.tokens[row.num_cached :]
        request_ids.append(row.request_id)
        cached.append(row.num_cached)
        known.append(len(new))
        known_ids += new
    for row, num_tokens in prefills:
        request_ids.append(row.request_id)
        cached.append(row.num_cached)
        known.append(num_tokens)
        known_ids += row.tokens[row.num_cached : row.num_cached + num_tokens]
    num_cached, num_known = np.array(cached, dtype=np.int64), np.array(known, dtype=np.int64)
    num_drafted = np.zeros(len(known), dtype=np.int64)
    num_drafted[: len(lengths)] = lengths
    stops = (num_known + num_drafted).cumsum()
    drafts = stops - num_drafted  # where the draft of each row begins
    places = runs(drafts, num_drafted)
    input_ids = np.zeros(len(known_ids) + len(places), dtype=np.int64)  # drafted ids may live on the device
    input_ids[runs(drafts - num_known, num_known)] = known_ids
    if draft.on_host:
        input_ids[places] = draft.token_ids.numpy()
    kv_lens = num_cached + num_known + num_drafted
    positions = runs(num_cached, num_known + num_drafted)
    logit_rows = runs(drafts[: len(lengths)] - 1, num_drafted[: len(lengths)] + 1)
    trees = [()] * len(known) if draft.parents is None else [_branches(draft.tree(row)) for row in range(len(lengths))]
    return PackedInputs(
        request_ids=tuple(request_ids),
        input_ids=torch.from_numpy(input_ids),
        position_ids=_by_depth(positions, stops, kv_lens, trees),
        qo_indptr=(0, *stops.tolist()),
        kv_lens=tuple(kv_lens.tolist()),
        logit_rows=torch.from_numpy(logit_rows),
        trees=(*trees, *[()] * (len(known) - len(trees))) if any(trees) else None,
        drafted=None if draft.on_host else Drafted(torch.from_numpy(places), draft.token_ids),
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
    branches = [()] * len(request_ids) if trees is None else [_branches(tree) for tree in trees]
    new, ends = np.array(lengths), np.array(kv_lens)
    stops = new.cumsum()
    num_tokens = int(stops[-1])
    on_host = token_ids.device.type == "cpu"
    return PackedInputs(
        request_ids=tuple(request_ids),
        input_ids=token_ids if on_host else torch.zeros(num_tokens, dtype=torch.int64),
        position_ids=_by_depth(runs(ends - new, new), stops, ends, branches),
        qo_indptr=(0, *stops.tolist()),
        kv_lens=tuple(kv_lens),
        logit_rows=torch.arange(num_tokens),
        trees=tuple(branches) if any(branches) else None,
        drafted=None if on_host else Drafted(torch.arange(num_tokens), token_ids),
    )


def _by_depth(
    positions: NDArray[np.int64], stops: NDArray[np.int64], kv_lens: NDArray[np.int64], trees: Seq[tuple[int, ...]]
) -> torch.Tensor:
    """``[nnz]`` positions of tokens that follow each other, with those of tree nodes, the last of a row, set right."""
    for row, tree in enumerate(trees):
        if tree:
            length = min(len(tree), int(stops[row] - (stops[row - 1] if row else 0)))  # the others are cached
            depth = np.array(depths(tree)[-length:])
            positions[stops[row] - length : stops[row]] = kv_lens[row] - len(tree) - 1 + depth
    return torch.from_numpy(positions)


def _branches(tree: Parents) -> tuple[int, ...]:
    """A tree that is a chain needs no mask."""
    return () if is_chain(tree) else tuple(tree)
