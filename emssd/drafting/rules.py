"""The rules of a draft: what a drafter returns is copied and held to its interface."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import index

import torch

from emssd.attention.trees import Parents, depths, is_chain
from emssd.drafting.draft import Draft
from emssd.errors import DraftError
from emssd.sequences import Batch, Sequence

__all__ = ["check_draft", "check_ids", "own_draft"]


def check_draft(draft: Draft, batch: Batch, budget: Seq[int], vocab_size: int, *, trees: bool = False) -> None:
    """Hold a drafter to its interface.

    Args:
        draft: what it returned.
        batch, budget: what it was asked for.
        vocab_size: of the target.
        trees: whether it says that it drafts trees.

    Raises:
        DraftError: token ids that are no flat int64 tensor, wrong number of rows, more than the budget, no tree, a tree
            that is too deep or was not announced, distributions of the wrong number or shape, or with NaN, or, where
            they lie on the host, ids outside the vocabulary.
    """
    if draft.token_ids.dtype != torch.int64 or draft.token_ids.ndim != 1:
        raise DraftError(
            f"its token_ids are {draft.token_ids.dtype} of {draft.token_ids.ndim} dimensions; "
            f"give one int64 tensor of all rows' tokens"
        )
    if draft.num_rows != len(batch) or draft.indptr[0] != 0 or draft.indptr[-1] != draft.token_ids.numel():
        raise DraftError(
            f"its draft has {draft.num_rows} rows over {draft.token_ids.numel()} tokens (indptr {draft.indptr}), "
            f"but the batch has {len(batch)} rows; return one chain or tree, possibly empty, per row"
        )
    for sequence, length, limit in zip(batch, draft.lengths, budget, strict=True):
        if not 0 <= length <= limit:
            raise DraftError(
                f"it drafted {length} tokens for request {sequence.request_id!r} with a budget of {limit}; "
                f"draft at most budget[row] tokens",
                "budget",
            )
    for rule, name, values in (("tree", "parents", draft.parents), ("confidence", "confidence", draft.confidence)):
        if values is not None and len(values) != draft.token_ids.numel():
            raise DraftError(
                f"its draft has {len(values)} {name} for {draft.token_ids.numel()} tokens; give one for each", rule
            )
    if draft.confidence is not None and not all(0 <= each <= 1 for each in draft.confidence):
        raise DraftError("its confidence has numbers outside of 0 to 1, or NaN; give probabilities", "confidence")
    for row, sequence in enumerate(batch):
        _check_tree(draft.tree(row), sequence, trees)
    if draft.q is not None:
        _check_q(draft, vocab_size)
    if draft.on_host:
        check_ids(draft.token_ids.tolist(), vocab_size)


def _check_tree(tree: Parents, sequence: Sequence, trees: bool) -> None:
    name = sequence.request_id
    for node, parent in enumerate(tree):
        if not -1 <= parent < node:
            raise DraftError(
                f"node {node} of its tree for request {name!r} has parent {parent}; a parent is an earlier node of the "
                f"same row, or -1 for the row's newest token",
                "tree",
            )
    if not trees and not is_chain(tree):
        raise DraftError(
            f"it drafted a token tree for request {name!r}, and its drafts_trees is False; draft a chain, or set "
            f"drafts_trees = True",
            "tree",
        )
    if (depth := max(depths(tree), default=0)) > max(0, sequence.num_remaining - 1):
        raise DraftError(
            f"its tree for request {name!r} has depth {depth}, and the row may still generate {sequence.num_remaining} "
            f"tokens; its depth is at most row.num_remaining - 1 (Draft.shallow cuts it)",
            "depth",
        )


def _check_q(draft: Draft, vocab_size: int) -> None:
    assert draft.q is not None
    if len(draft.q) != draft.num_rows:
        raise DraftError(f"its draft has q for {len(draft.q)} rows of {draft.num_rows}; give None where there is none")
    for row, (q, length) in enumerate(zip(draft.q, draft.lengths, strict=True)):
        if q is None:
            continue
        if len(q) != 1 + length:
            raise DraftError(
                f"its q has {len(q)} distributions for a row of {length} tokens; give one behind the newest token, and "
                f"one behind each of its own"
            )
        for place in {parent + 1 for parent in draft.tree(row)}:
            if q[place].shape != (vocab_size,) or not q[place].is_floating_point():
                raise DraftError(
                    f"its q has a tensor of shape {list(q[place].shape)} and {q[place].dtype} behind a token with "
                    f"children; give {vocab_size} probabilities"
                )
            if not q[place].sum().isfinite():
                raise DraftError(f"its q has NaN or inf behind a token with children; give {vocab_size} probabilities")


def own_draft(draft: Draft, batch: Batch, budget: Seq[int], vocab_size: int, *, trees: bool = False) -> Draft:
    """A copy of `draft` that nobody else can write to, held to the interface; see `check_draft`.

    The distributions of its `q` are not copied, as they are large. Who writes to them says something else about them.

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
        confidence=None if draft.confidence is None else tuple(map(float, draft.confidence)),
        q=None if draft.q is None else tuple(None if row is None else tuple(row) for row in draft.q),
    )
    check_draft(own, batch, budget, vocab_size, trees=trees)
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
            f"of {vocab_size}; ids must be in 0..{vocab_size - 1}",
            "vocabulary",
        )
