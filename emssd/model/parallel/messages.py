"""Messages of process 0 to the others: the work of a step, and changes of KV between two steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from emssd.attention import PackedInputs

__all__ = ["Message", "packed_of", "step_of"]


class Message(NamedTuple):
    """A call that the other processes make of the model, or the cache, of a number.

    Attributes:
        call: a method of `emssd.model.parallel.follower` or of the cache's runner; ``end`` for nothing more.
        arguments: of that method; they hold no tensors.
    """

    call: str
    number: int
    arguments: tuple[Any, ...] = ()


_Step = tuple[Any, ...]
"""The fields of `PackedInputs`, with lists in the place of tensors; it pickles in a twentieth of their time."""


def step_of(packed: PackedInputs) -> _Step:
    """A step, with all of its tokens; those that only a device knows are fetched."""
    token_ids = packed.input_ids
    if packed.drafted is not None:
        token_ids = token_ids.index_copy(0, packed.drafted.places, packed.drafted.token_ids.to(token_ids.device))
    inputs = token_ids.tolist(), packed.position_ids.tolist(), packed.logit_rows.tolist()
    return packed.request_ids, *inputs, packed.qo_indptr, packed.kv_lens, packed.trees


def packed_of(step: _Step) -> PackedInputs:
    """The step that `step_of` was given."""
    request_ids, token_ids, position_ids, logit_rows, qo_indptr, kv_lens, trees = step
    tokens, positions, logits = (torch.tensor(x, dtype=torch.int64) for x in (token_ids, position_ids, logit_rows))
    return PackedInputs(request_ids, tokens, positions, qo_indptr, kv_lens, logits, trees)
