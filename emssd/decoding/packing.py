"""Concatenates the new tokens of all rows into one ragged input, without padding (paper §3.2, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from emssd.attention import PackedInputs
from emssd.attention.packed import Drafted, runs
from emssd.attention.trees import Parents, depths, is_chain
from emssd.drafting import Draft

__all__ = ["pack", "pack_nodes"]


class Packable(Protocol):
    """The part of a `Row` that `pack` reads."""

    @property
    def request_id(self) -> str: ...
    @property
    def tokens(self) -> Seq[int]: ...
    @property
    def num_cached(self) -> int: ...


def pack(
    rows: Iterable[Packable], draft: Draft, prefills: Iterable[tuple[Packable, int]] = (), *, greedy: bool = False
) -> PackedInputs:
    """Row ``i`` becomes ``tokens[num_cached:]`` followed by its draft: prefill and decoding are one path.

    Args:
        rows: each with at least one token that is not cached.
        draft: trees for these rows.
        prefills: further rows, of each the number of tokens after the cached ones; no logits of theirs are wanted.
        greedy: see `PackedInputs`.
    """
    request_ids, input_ids, cached, uncached = [], list[int](), [], []  # tokens of each row, its draft included
    lengths, on_host = draft.lengths, draft.on_host
    drafted = draft.token_ids.tolist() if on_host else [0] * draft.indptr[-1]
    for row, start, length in zip(rows, draft.indptr[:-1], lengths, strict=True):
        new = row.tokens[row.num_cached :]
        request_ids.append(row.request_id)
        cached.append(row.num_cached)
        uncached.append(len(new) + length)
        input_ids += new
        input_ids += drafted[start : start + length]
    for row, num_tokens in prefills:
        request_ids.append(row.request_id)
        cached.append(row.num_cached)
        uncached.append(num_tokens)
        input_ids += row.tokens[row.num_cached : row.num_cached + num_tokens]
    new_tokens = np.array(uncached, np.int64)
    stops, kv_lens = new_tokens.cumsum(), np.array(cached, np.int64) + new_tokens
    places = np.arange(len(input_ids))
    positions = (kv_lens - stops).repeat(new_tokens) + places
    logit_rows, drafts = places, places[:0]
    if not (on_host and len(input_ids) == len(lengths) + draft.indptr[-1]):  # else the logits of all are wanted
        num_drafted = np.array(lengths, dtype=np.int64)
        begins = stops[: len(lengths)] - num_drafted  # where the draft of each row begins
        logit_rows, drafts = runs(begins - 1, num_drafted + 1), runs(begins, num_drafted)
    trees = None if draft.parents is None else list(map(_branches, map(draft.tree, range(len(lengths)))))
    return PackedInputs(
        request_ids=tuple(request_ids),
        input_ids=torch.from_numpy(np.array(input_ids, np.int64)),
        position_ids=torch.from_numpy(_by_depth(positions, stops, kv_lens, trees or ())),
        qo_indptr=(0, *stops.tolist()),
        kv_lens=tuple(kv_lens.tolist()),
        logit_rows=torch.from_numpy(logit_rows),
        trees=(*trees, *[()] * (len(uncached) - len(trees))) if trees is not None and any(trees) else None,
        drafted=None if on_host else Drafted(torch.from_numpy(drafts), draft.token_ids),
        greedy=greedy,
    )


def pack_nodes(
    request_ids: Seq[str],
    token_ids: torch.Tensor,
    lengths: Seq[int],
    kv_lens: Seq[int],
    trees: Seq[Parents] | None = None,
) -> PackedInputs:
    """Drafted tokens alone, after others that are cached: the step of a drafter that decodes with a model of its own.

    Args:
        request_ids: ``[B]``.
        token_ids: ``[nnz]`` int64, on any device.
        lengths: ``[B]`` how many of them each row has.
        kv_lens: ``[B]`` the KV length of each row with them.
        trees: ``[B]`` parents of all drafted tokens of a row, those that are cached first; ``None`` for chains.
    """
    branches = [()] * len(request_ids) if trees is None else list(map(_branches, trees))
    new, ends = np.array(lengths), np.array(kv_lens)
    stops = new.cumsum()
    num_tokens = int(stops[-1])
    on_host = token_ids.device.type == "cpu"
    return PackedInputs(
        request_ids=tuple(request_ids),
        input_ids=token_ids if on_host else torch.zeros(num_tokens, dtype=torch.int64),
        position_ids=torch.from_numpy(_by_depth(runs(ends - new, new), stops, ends, branches)),
        qo_indptr=(0, *stops.tolist()),
        kv_lens=tuple(kv_lens),
        logit_rows=torch.arange(num_tokens),
        trees=tuple(branches) if any(branches) else None,
        drafted=None if on_host else Drafted(torch.arange(num_tokens), token_ids),
    )


def _by_depth(
    positions: NDArray[np.int64], stops: NDArray[np.int64], kv_lens: NDArray[np.int64], trees: Seq[tuple[int, ...]]
) -> NDArray[np.int64]:
    """``[nnz]`` positions of tokens that follow each other, with those of tree nodes, the last of a row, set right."""
    for row, tree in enumerate(trees):
        if tree:
            length = min(len(tree), int(stops[row] - (stops[row - 1] if row else 0)))  # the others are cached
            depth = np.array(depths(tree)[-length:])
            positions[stops[row] - length : stops[row]] = kv_lens[row] - len(tree) - 1 + depth
    return positions


def _branches(tree: Parents) -> tuple[int, ...]:
    """A tree that is a chain needs no mask."""
    return () if is_chain(tree) else tuple(tree)
