"""FlashInfer's arithmetic of an ``fa2`` plan, as in ``scheduler.cuh`` of 0.6.18: tiles of queries, and workspace."""

from __future__ import annotations

__all__ = ["eager_workspace", "query_tile", "recorded_rows"]

_FLOAT32 = 4  # bytes
_BLOCKS_PER_SM = 2


def query_tile(packed_q_len: int, head_dim: int) -> int:
    """The number of queries, counted for each head of a group, of a block of the kernel (``FA2DetermineCtaTileQ``).

    `packed_q_len` is queries of a row times heads of a group. An eager plan takes the mean over its rows. A recorded
    one takes its longest possible row, as if all other rows had one query. A head has at most 256 elements.
    """
    if packed_q_len > 64 and head_dim < 256:
        return 128
    return 64 if packed_q_len > 16 else 16


def recorded_rows(size: int, max_batch_size: int, group: int, head_dim: int) -> int:
    """Rows of a recording of `size` tokens: enough for every step, and so many that its kernels take the tile which
    FlashInfer takes for an eager step of as many tokens in a full batch.

    A recorded plan is for any lengths of its rows, so FlashInfer takes the tile of the longest: all tokens but one for
    each other row. Rows that are always empty make that one shorter. A real row that is longer takes several tiles.
    There is a `group` of query heads for each key head.
    """
    fewest = min(size, max_batch_size)
    tile = query_tile(-(-size // fewest) * group, head_dim)
    return fewest if query_tile((size - fewest + 1) * group, head_dim) <= tile else size - tile // group + 1


def eager_workspace(num_qo_heads: int, num_kv_heads: int, head_dim: int, num_sms: int) -> int:
    """The most bytes of partial results of any eager plan: it splits KV only as long as all its blocks run at once."""
    sums_and_outputs = num_qo_heads * query_tile(128, head_dim) * (head_dim + 1)
    return _BLOCKS_PER_SM * num_sms // num_kv_heads * sums_and_outputs * _FLOAT32
