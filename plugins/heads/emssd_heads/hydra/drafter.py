"""Drafts with Hydra heads for the whole batch at once: trees that grow level by level, or chains.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", arXiv 2402.05109.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from emssd.attention import Kept, on_device
from emssd.draft_models import GrowingRow, Level, Shape, nodes_of, pack_nodes
from emssd.model import BorrowedTarget
from emssd_heads import HeadRunner, StatesDrafter
from emssd_heads.hydra.heads import LoadedHydra

__all__ = ["HydraDrafter"]


class HydraDrafter(StatesDrafter):
    """Drafts with heads that read a hidden state, and all tokens from the newest one to a node.

    The hidden state is that of the token before the newest one: the target chose the newest token from it. A prefix
    layer's output there takes its place. The head at 0 reads the newest token too, and gives the first drafted ones.

    Args:
        runner: of the prefix layer, if there is one; its KV cache takes no trees.
        max_len: tokens of the longest row in the cache of the prefix layer.
    """

    caches_nodes = False

    def __init__(
        self, loaded: LoadedHydra, runner: HeadRunner | None, target: BorrowedTarget, shape: Shape, max_len: int
    ) -> None:
        super().__init__(shape, loaded.layers, target, runner, max_len)
        self._heads, self._runner = loaded.head, runner
        self.reads_all = runner is not None

    def catch_up(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        self._hidden, self._places = self._read(rows), {row.request_id: place for place, row in enumerate(rows)}
        return self.compute([(row, [(-1, ())]) for row in rows])

    def compute(self, level: Level) -> torch.Tensor:
        hidden, paths = self._hidden, [[row.tokens[-1], *row.tree.path(node)] for row, node in nodes_of(level)]
        ids = torch.tensor(paths)
        embeds = self._target.embed(on_device(ids.flatten(), hidden.device)).view(*ids.shape, -1)
        places = on_device([self._places[row.request_id] for row, _ in nodes_of(level)], hidden.device)
        logits: torch.Tensor = self._heads(hidden[places], embeds)
        return logits

    def _read(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        """``[r, hidden]`` what the heads read of each row: a state as it is, or the prefix layer's output there."""
        states = [self._states[row.request_id].new(row.tree.num_tokens) for row in rows]
        if self._runner is None:
            return torch.cat(states)
        names, kv_lens = tuple(row.request_id for row in rows), tuple(row.tree.num_tokens for row in rows)
        lengths = list(map(len, states))
        packed = pack_nodes(names, torch.zeros(sum(lengths), dtype=torch.int64), lengths, kv_lens)
        packed = replace(packed, logit_rows=torch.tensor(packed.qo_indptr[1:]) - 1)
        hidden = self._runner.run(packed, torch.cat(states))
        self._runner.commit(Kept(names, kv_lens))
        self._have_used(rows)
        return hidden
