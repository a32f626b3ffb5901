"""`BlockRunner`: runs a `BlockHead` on an attention backend, whose rows are causal, although a block is not.

In most layers, a token of a block sees the whole block. A backend lets a token see the KV of its row up to its own. So
a row computes its new features, its block, and its block a second time: keys and values come from the first copy, and
queries from the second. In causal layers, queries come from the first copy as well. The second copy hides its keys:
queries and keys have one element more, by which the weights of its keys become exactly 0.

A sliding window is longer by the block, so that a query sees as far back as it would from its true position.
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

_HIDDEN = 128.0  # its square is subtracted from scores: far more than they differ, without overflow in half precision


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A row, and its block's first position `start`; the last ``features [n, hidden_size]`` before it are new."""

    request_id: str
    start: int
    features: torch.Tensor


class BlockRunner(DraftCache):
    """A head with its KV in an attention backend, which is allocated for the head's `kv_cache_spec`."""

    def __init__(self, head: BlockHead, backend: AttentionBackend) -> None:
        super().__init__(backend)
        self.head, self._backend = head, backend
        self._size, self._doubled = head.variant.block_size, not all(head.variant.causal)

    @property
    def num_slots(self) -> int:
        """Tokens of a row in a pass, beside its features."""
        return self._size * (2 if self._doubled else 1)

    def run(self, rows: Seq[BlockRow], embeds: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[r * block_size, hidden_size]`` of blocks before the final norm, from `embeds` of that shape.

        The KV of features is kept.
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
        index = on_device(self._index(rows, sizes), embeds.device)
        if plan.replay is not None:
            index, embeds, features = (
                self.in_place((name, sizes.step), values, number)
                for name, values, number in (
                    ("index", index, len(index)),
                    ("blocks", embeds, sizes.blocks),
                    ("features", features, sizes.features),
                )
            )
        parts = [sizes.features + sizes.blocks, sizes.step, *[sizes.step, sizes.blocks] * 2]
        positions, keys, *queries = index.split_with_sizes(parts)

        def compute() -> torch.Tensor:
            hidden: torch.Tensor = self.head(embeds, features, positions, self._attend(plan, keys, queries))
            return hidden

        hidden: torch.Tensor = compute() if plan.replay is None else plan.replay(compute)
        self.commit(Kept(tuple(names), tuple(starts)))
        return hidden[:num_blocks]

    def _index(self, rows: Seq[BlockRow], sizes: _Sizes) -> list[int]:
        """Positions of features and blocks; then the sources of a step's tokens among these. See `_attend`.

        For each token the source of its key; then, for queries of causal layers and again for the rest, the source of
        each token among blocks, and the token in the step of each source. Tokens that fill a size read anything.
        """
        before = [position for row in rows for position in range(row.start - len(row.features), row.start)]
        inside = [position for row in rows for position in range(row.start, row.start + self._size)]
        hidden, keys = sizes.features + sizes.blocks, list[int]()
        blocks, seconds = list[int](), list[int]()
        num_features = num_blocks = 0
        for row in rows:
            first, new = len(keys) + len(row.features), range(num_blocks, num_blocks + self._size)
            keys += range(num_features, num_features + len(row.features))
            keys += [sizes.features + slot for slot in new]
            keys += [hidden] * (self.num_slots - self._size)
            blocks += range(first, first + self._size)
            seconds += range(first + self.num_slots - self._size, first + self.num_slots)
            num_features, num_blocks = num_features + len(row.features), new.stop
        index = [*_filled(before, sizes.features), *_filled(inside, sizes.blocks), *_filled(keys, sizes.step, hidden)]
        for tokens in (blocks, seconds):
            read = [0] * sizes.step
            for slot, token in enumerate(tokens):
                read[token] = slot
            index += [*read, *_filled(tokens, sizes.blocks)]
        return index

    def _attend(self, plan: StepPlan, keys_at: torch.Tensor, queries_at: Seq[torch.Tensor]) -> BlockAttend:
        """Attention of a step, by parts of `_index`."""

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            dim, doubled = query.shape[-1], not self.head.variant.causal[layer]
            read, tokens = queries_at[2:] if doubled else queries_at[:2]
            key, value = (F.pad(rows, (0, 0, 0, 0, 0, 1)) for rows in (key, value))  # the last is of hidden tokens
            if doubled:
                query, key = F.pad(query, (0, 1), value=_HIDDEN), F.pad(key, (0, 1))
                key[-1, :, dim] = -_HIDDEN * dim**0.5  # scores are divided by this root
            step = query[read], key[keys_at], value[keys_at]
            out = self._backend.forward(plan, layer, *(fed(plan, rows) for rows in step))
            return plan.packed(out, len(keys_at))[tokens]

        return attend


class _Sizes(NamedTuple):
    """Numbers of tokens that are computed, by kind; those of recorded steps are filled up."""

    step: int
    features: int
    blocks: int


def _filled(values: list[int], size: int, value: int = 0) -> list[int]:
    return values + [value] * (size - len(values))
