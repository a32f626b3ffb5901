"""`BlockLane`: runs a `BlockHead` on an attention backend, whose rows are causal, although a block is not.

In most layers, every token of a block sees all others. A backend lets a token see the KV of its row up to its own. So a
row computes its new features, its block, and its block a second time: keys and values come from the first, and queries
from the second. In layers that are causal, queries come from the first as well. Whatever is second must hide its own
keys. For this, keys have one element more, and queries too: it is 0 in what is to be seen, and such in what is not that
the weight becomes exactly 0.

A sliding window is as much longer as the block, so that a query sees as far back as it would from its true place.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import torch

from emssd.attention import AttentionBackend, Kept, StepPlan, on_device
from emssd.drafters import Lane, fed, pack_nodes
from emssd_dflash.head import BlockAttend, BlockHead

__all__ = ["BlockLane", "BlockRow"]

_HIDDEN = 128.0  # its square is subtracted from scores: far more than they differ, and no overflow in half precision


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A row whose block is computed.

    Attributes:
        request_id: whose KV it reads and writes.
        start: position of the block's first token. So many features are in the cache, or come now.
        features: ``[n, hidden_size]``, the last of those.
    """

    request_id: str
    start: int
    features: torch.Tensor


class BlockLane(Lane):
    """A head on one device, with its KV in an attention backend.

    Args:
        head: with its weights.
        backend: allocated for the head's `kv_cache_spec`.
    """

    def __init__(self, head: BlockHead, backend: AttentionBackend) -> None:
        super().__init__(backend)
        self.head, self._backend = head, backend
        self._size, self._doubled = head.variant.block_size, not all(head.variant.causal)

    @property
    def num_slots(self) -> int:
        """KV that a row takes beside that of its features, for the time of a pass."""
        return self._size * (2 if self._doubled else 1)

    def run(self, rows: Seq[BlockRow], embeds: torch.Tensor) -> torch.Tensor:
        """Compute the blocks of some rows. Of their KV that of features alone is kept.

        Args:
            rows: ``[r]``.
            embeds: ``[r * block_size, hidden_size]`` of the blocks' tokens.

        Returns:
            ``[r * block_size, hidden_size]`` hidden states of blocks, before the final norm.
        """
        lengths = [len(row.features) + self.num_slots for row in rows]
        names, starts = [row.request_id for row in rows], [row.start for row in rows]
        ids = torch.zeros(sum(lengths), dtype=torch.int64)
        packed = pack_nodes(names, ids, lengths, [start + self.num_slots for start in starts])
        plan = self._backend.plan(packed)
        attend = self._attend(plan, packed.num_tokens, *self._places(rows, lengths, embeds.device))
        features = torch.cat([row.features for row in rows])
        hidden: torch.Tensor = self.head(embeds, features, self._positions(rows, embeds.device), attend)
        self.commit(Kept(tuple(names), tuple(starts)))
        return hidden

    def _positions(self, rows: Seq[BlockRow], device: torch.device) -> torch.Tensor:
        """``[c + m]`` the positions of all features, and then of all blocks."""
        found = [place for row in rows for place in range(row.start - len(row.features), row.start)]
        found += [place for row in rows for place in range(row.start, row.start + self._size)]
        return on_device(found, device)

    def _places(
        self, rows: Seq[BlockRow], lengths: Seq[int], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The places of features and blocks ``[c + m]``, of the latter ``[m]``, and of what sees all ``[m]``."""
        firsts = [0, *accumulate(lengths)]
        features, blocks = list[int](), list[int]()
        for first, row in zip(firsts, rows, strict=False):
            features += range(first, first + len(row.features))
            blocks += range(first + len(row.features), first + len(row.features) + self._size)
        queries = [place + self._size for place in blocks] if self._doubled else blocks
        return on_device(features + blocks, device), on_device(blocks, device), on_device(queries, device)

    def _attend(
        self, plan: StepPlan, num_tokens: int, all_keys: torch.Tensor, blocks: torch.Tensor, seconds: torch.Tensor
    ) -> BlockAttend:
        """Attention of a step whose tokens at `all_keys`, `blocks` and `seconds` are those that `_places` gives."""

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            (num_heads, dim), num_kv_heads = query.shape[1:], key.shape[1]
            doubled = not self.head.variant.causal[layer]
            places, wide = (seconds, dim + 1) if doubled else (blocks, dim)
            queries = query.new_zeros(num_tokens, num_heads, wide)
            keys, values = key.new_zeros(num_tokens, num_kv_heads, wide), value.new_zeros(num_tokens, num_kv_heads, dim)
            if doubled:
                queries[..., dim] = _HIDDEN
                keys[..., dim] = -_HIDDEN * dim**0.5  # what queries and keys give is divided by this root
                keys[all_keys, :, dim] = 0
            queries[places, :, :dim] = query
            keys[all_keys, :, :dim] = key
            values[all_keys] = value
            out = self._backend.forward(plan, layer, *(fed(plan, each) for each in (queries, keys, values)))
            return plan.packed(out, num_tokens)[places]

        return attend
