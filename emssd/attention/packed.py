"""`PackedInputs`, the ragged input of one step, and the moves of small tensors between host and device."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import sub
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from emssd.attention.trees import depths

__all__ = ["Drafted", "on_device", "runs", "to_host"]


class Drafted(NamedTuple):
    """Drafted tokens that only a device knows.

    Attributes:
        places: ``[d]`` int64 on the host, the tokens of the step that they are.
        token_ids: ``[d]`` int64 on the device.
    """

    places: torch.Tensor
    token_ids: torch.Tensor


class StepInputs(NamedTuple):
    """The tensors of a step that the model reads, ``[nnz]``, ``[nnz]`` and ``[R]``, on its device."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor


class PackedInputs(NamedTuple):
    """The ragged input of one step, on the host. Row ``i`` owns tokens ``qo_indptr[i]:qo_indptr[i + 1]``.

    Its tokens are the last of its KV: token ``j`` of row ``i`` has the index ``kv_lens[i] - q_len + j`` there. It
    sees the KV up to itself. In a row that ends with a tree, a node sees what is before the tree, its ancestors and
    itself. The first nodes may be in the cache already, of an earlier step that was not committed.

    Attributes:
        request_ids: ``[B]``, the request whose KV each row reads and writes.
        input_ids: ``[nnz]`` int64; 0 where a token is one of `drafted`.
        position_ids: ``[nnz]`` int64, true positions counted from 0 in each sequence. In a tree they go by depth.
        qo_indptr: ``[B + 1]`` integers with a leading zero.
        kv_lens: ``[B]``, the KV length of each row once the tokens of this step are written.
        logit_rows: ``[R]`` int64, the tokens whose logits are wanted: the newest token of each row and its drafts, but
            none in rows that compute a piece of their prompt.
        trees: ``[B]``, for each row the tree that its last KV is, see `emssd.attention.trees`; empty for a row without
            branches. ``None``: no row has any.
        drafted: tokens that only the device knows; ``None`` if the host knows all.
        greedy: whether the step is recorded with the most probable token at each of `logit_rows`, on its way to the
            host.
    """

    request_ids: tuple[str, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    qo_indptr: tuple[int, ...]
    kv_lens: tuple[int, ...]
    logit_rows: torch.Tensor
    trees: tuple[tuple[int, ...], ...] | None = None
    drafted: Drafted | None = None
    greedy: bool = False

    @property
    def num_rows(self) -> int:
        """Number of rows ``B``."""
        return len(self.request_ids)

    @property
    def lengths(self) -> list[int]:
        """``[B]`` number of tokens of each row."""
        return list(map(sub, self.qo_indptr[1:], self.qo_indptr))

    @property
    def num_tokens(self) -> int:
        """Number of tokens ``nnz``."""
        return self.qo_indptr[-1]

    def kv_positions(self, row: int) -> list[int]:
        """``[kv_lens[row]]`` the position of each token in the KV of a row."""
        tree = self.trees[row] if self.trees is not None else ()
        num_before = self.kv_lens[row] - len(tree)
        return [*range(num_before), *(num_before - 1 + depth for depth in depths(tree))]

    def rectangle(self, rows: Seq[int]) -> tuple[list[int], list[int]]:
        """The packed token at each place of a rectangle of these rows, and the place of each of their tokens.

        It is as wide as the longest of them; places after the end of a shorter row repeat its last token.
        """
        lengths = self.lengths
        longest = max(lengths[row] for row in rows)
        tokens, places = list[int](), list[int]()
        for first, row in zip(range(0, longest * len(rows), longest), rows, strict=True):
            start, stop = self.qo_indptr[row], self.qo_indptr[row + 1]
            tokens += [*range(start, stop), *[stop - 1] * (longest - (stop - start))]
            places += range(first, first + stop - start)
        return tokens, places

    def on(self, device: torch.device) -> StepInputs:
        """The model's inputs, moved to `device` in one copy."""
        if self.drafted is None:
            return StepInputs(*together([self.input_ids, self.position_ids, self.logit_rows], device))
        inputs = [self.input_ids, self.position_ids, self.logit_rows, self.drafted.places]
        ids, positions, logit_rows, places = together(inputs, device)
        ids = ids.index_copy(0, places, self.drafted.token_ids.to(device))
        return StepInputs(ids, positions, logit_rows)


def runs(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """``[sum(lengths)]`` int64: for each row the integers from ``starts[i]`` on, ``lengths[i]`` of them."""
    ends = np.add.accumulate(lengths)
    places = (starts - ends + lengths).repeat(lengths)
    places += np.arange(len(places))
    return places


def on_device(values: Seq[int] | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """``[n]`` integers of the host, moved to `device` as `dtype`; to a GPU through pinned memory, so that the host does
    not wait.
    """
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    elif device.type == "cuda" and values.device.type == "cpu":
        values = values.to(dtype).pin_memory()
    return values.to(device, dtype, non_blocking=True)


def to_host(values: torch.Tensor) -> list[int]:
    """``[n]`` integers as host integers. From a GPU this is one copy into pinned memory, and one wait for it.

    What lies in pinned memory already is being copied there, by the current stream.
    """
    if values.device.type != "cuda":
        if values.is_pinned():
            torch.cuda.current_stream().synchronize()
        return values.tolist()
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    pinned.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    return pinned.tolist()


def together(tensors: Seq[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Flat int64 tensors of the host, moved to `device` in one copy. The results are views of one tensor."""
    if device.type == "cpu":
        return list(tensors)
    moved = on_device(torch.cat(list(tensors)), device)
    return list(torch.split_with_sizes(moved, [len(tensor) for tensor in tensors]))
