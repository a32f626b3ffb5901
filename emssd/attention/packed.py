"""`PackedInputs`: the ragged input of one step, as the model and its attention backend receive it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

__all__ = ["PackedInputs"]


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """The ragged input of one step. Row ``i`` owns tokens ``qo_indptr[i]:qo_indptr[i + 1]`` of the ``nnz``.

    Attributes:
        request_ids: ``[B]``, the request whose KV each row reads and writes.
        input_ids: ``[nnz]`` int64.
        position_ids: ``[nnz]`` int64, true positions counted from 0 in each sequence.
        qo_indptr: ``[B + 1]`` host integers with a leading zero.
        kv_lens: ``[B]`` host integers: the KV length of each row once the tokens of this step are written.
        logit_rows: ``[R]`` int64, the tokens whose logits are wanted: the newest token of each row and its drafts, but
            none in rows that compute a piece of their prompt.
    """

    request_ids: tuple[str, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    qo_indptr: tuple[int, ...]
    kv_lens: tuple[int, ...]
    logit_rows: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Number of rows ``B``."""
        return len(self.request_ids)

    @property
    def lengths(self) -> list[int]:
        """``[B]`` number of tokens of each row."""
        return [stop - start for start, stop in pairwise(self.qo_indptr)]

    @property
    def num_tokens(self) -> int:
        """Number of tokens ``nnz``."""
        return self.qo_indptr[-1]
