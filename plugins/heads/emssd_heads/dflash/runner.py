"""`BlockRunner`: runs a `BlockHead` on an attention backend, whose rows are causal, although a block is not.

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
from typing import NamedTuple

import torch
import torch.nn.functional as F

from emssd.attention import AttentionBackend, Kept, StepPlan, on_device
from emssd.draft_models import DraftCache, fed, pack_nodes
from emssd_heads.dflash.head import BlockAttend, BlockHead

__all__ = ["BlockRow", "BlockRunner"]

_HIDDEN = 128.0  # its square is subtracted from scores: far more than they differ, and no overflow in half precision


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A row whose block is computed.

    Attributes:
        start: position of the block's first token. So many features are in the cache, or come now.
        features: ``[n, hidden_size]``, the last of those.
    """

    request_id: str
    start: int
    features: torch.Tensor


class BlockRunner(DraftCache):
    """A head on one device, with its KV in an attention backend, which is allocated for the head's `kv_cache_spec`."""

    def __init__(self, head: BlockHead, backend: AttentionBackend) -> None:
        super().__init__(backend)
        self.head, self._backend = head, backend
        self._size, self._doubled = head.variant.block_size, not all(head.variant.causal)

    @property
    def num_slots(self) -> int:
        """KV that a row takes beside that of its features, for the time of a pass."""
        return self._size * (2 if self._doubled else 1)

    def run(self, rows: Seq[BlockRow], embeds: torch.Tensor) -> torch.Tensor:
        """Hidden states of the blocks of some rows, before the final norm, of their `embeds`: both are
        ``[r * block_size, hidden_size]``. Of the rows' KV that of features alone is kept.
        """
        lengths = [len(row.features) + self.num_slots for row in rows]
        names, starts = [row.request_id for row in rows], [row.start for row in rows]
        ids = torch.zeros(sum(lengths), dtype=torch.int64)
        packed = pack_nodes(names, ids, lengths, [start + self.num_slots for start in starts])
        plan, features = self._backend.plan(packed), torch.cat([row.features for row in rows])
        num_blocks, sizes = len(embeds), _Sizes(packed.num_tokens, len(features), len(embeds))
        if plan.replay is not None:
            size = plan.input_ids.numel()
            sizes = _Sizes(size, size - self.num_slots, size // self.num_slots * self._size)  # no step has more
        places = on_device(self._places(rows, sizes), embeds.device)
        if plan.replay is not None:
            places, embeds, features = (
                self.in_place((name, sizes.step), each, number)
                for name, each, number in (
                    ("places", places, len(places)),
                    ("blocks", embeds, sizes.blocks),
                    ("features", features, sizes.features),
                )
            )
        positions, keys, *queries = places.split_with_sizes(sizes.of_places)

        def compute() -> torch.Tensor:
            hidden: torch.Tensor = self.head(embeds, features, positions, self._attend(plan, keys, queries))
            return hidden

        hidden: torch.Tensor = compute() if plan.replay is None else plan.replay(compute)
        self.commit(Kept(tuple(names), tuple(starts)))
        return hidden[:num_blocks]

    def _positions(self, rows: Seq[BlockRow]) -> tuple[list[int], list[int]]:
        """The positions of all features, and of all blocks."""
        features = [place for row in rows for place in range(row.start - len(row.features), row.start)]
        return features, [place for row in rows for place in range(row.start, row.start + self._size)]

    def _places(self, rows: Seq[BlockRow], sizes: _Sizes) -> list[int]:
        """Positions of features and blocks; then where what a step's tokens are made of is among these. See `_attend`.

        For each token its key; for the queries of causal layers, and then of others, each token's among blocks, and for
        each token of blocks its place in the step. What is only there to fill a size reads anything.
        """
        hidden, keys = sizes.features + sizes.blocks, list[int]()
        blocks, seconds = list[int](), list[int]()
        num_features = num_blocks = 0
        for row in rows:
            first, new = len(keys) + len(row.features), range(num_blocks, num_blocks + self._size)
            keys += range(num_features, num_features + len(row.features))
            keys += [sizes.features + place for place in new]
            keys += [hidden] * (self.num_slots - self._size)
            blocks += range(first, first + self._size)
            seconds += range(first + self.num_slots - self._size, first + self.num_slots)
            num_features, num_blocks = num_features + len(row.features), new.stop
        positions = [_filled(*pair) for pair in zip(self._positions(rows), sizes[1:], strict=True)]
        found = [*positions[0], *positions[1], *_filled(keys, sizes.step, hidden)]
        for places in (blocks, seconds):
            read = [0] * sizes.step
            for place, token in enumerate(places):
                read[token] = place
            found += [*read, *_filled(places, sizes.blocks)]
        return found

    def _attend(self, plan: StepPlan, keys_at: torch.Tensor, queries_at: Seq[torch.Tensor]) -> BlockAttend:
        """Attention of a step, by what `_places` gives."""

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            dim, doubled = query.shape[-1], not self.head.variant.causal[layer]
            read, places = queries_at[2:] if doubled else queries_at[:2]
            key, value = (F.pad(each, (0, 0, 0, 0, 0, 1)) for each in (key, value))  # the last is that of hidden tokens
            if doubled:
                query, key = F.pad(query, (0, 1), value=_HIDDEN), F.pad(key, (0, 1))
                key[-1, :, dim] = -_HIDDEN * dim**0.5  # what queries and keys give is divided by this root
            step = query[read], key[keys_at], value[keys_at]
            out = self._backend.forward(plan, layer, *(fed(plan, each) for each in step))
            return plan.packed(out, len(keys_at))[places]

        return attend


class _Sizes(NamedTuple):
    """Numbers of tokens that are computed, by kind; those of recorded steps are filled up."""

    step: int
    features: int
    blocks: int

    @property
    def of_places(self) -> list[int]:
        """Of the parts of `BlockRunner._places`."""
        return [self.features + self.blocks, self.step, *[self.step, self.blocks] * 2]


def _filled(values: list[int], size: int, value: int = 0) -> list[int]:
    return values + [value] * (size - len(values))
