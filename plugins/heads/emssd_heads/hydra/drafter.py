"""Drafts with Hydra heads for the whole batch at once: trees that grow level by level, or chains.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", arXiv 2402.05109.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from emssd.attention import Kept, on_device
from emssd.draft_models import GrowingRow, Level, Shape, nodes_of
from emssd_heads import HeadRunner, Loaded, StatesDrafter, TargetWeights
from emssd_heads.residual import ResidualHeads

__all__ = ["HydraDrafter"]


class HydraDrafter(StatesDrafter):
    """Drafts with heads that read a hidden state, and all tokens from the newest one to a node.

    The hidden state is that of the token before the newest one: the target chose the newest token from it. A prefix
    layer's output there takes its place. The head at 0 reads the newest token too, and gives the first drafted ones.

    Args:
        loaded: heads, and a prefix layer if there is one; its KV cache takes no trees.
        shape: of the trees; one child for each node makes chains.
        lent: what it borrows.
    """

    caches_nodes = False

    def __init__(self, loaded: Loaded[ResidualHeads], shape: Shape, lent: TargetWeights) -> None:
        self._heads, self._runner, spec = loaded.head, None, lent.spec
        if loaded.prefix is not None:
            spec = loaded.prefix.kv_cache_spec(replace(spec, trees=False))
            self._runner = HeadRunner(loaded.prefix, lent.make_cache(spec), compile=lent.compile)
        super().__init__(shape, loaded.layers, lent.target, self._runner, spec.max_model_len)
        self.reads_all = self._runner is not None

    def catch_up(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        self._hidden, self._index = self._read(rows), {row.request_id: index for index, row in enumerate(rows)}
        return self.compute([(row, [(-1, ())]) for row in rows])

    def compute(self, level: Level) -> torch.Tensor:
        hidden, paths = self._hidden, [[row.tokens[-1], *row.tree.path(node)] for row, node in nodes_of(level)]
        ids = torch.tensor(paths)
        embeds = self._target.embed(on_device(ids.flatten(), hidden.device)).view(len(ids), -1)
        index = on_device([self._index[row.request_id] for row, _ in nodes_of(level)], hidden.device)
        logits: torch.Tensor = self._heads(ids.shape[1] - 1, torch.cat([hidden[index], embeds], dim=-1))
        return logits

    def _read(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        """``[r, hidden]`` what the heads read of each row: a state as it is, or the prefix layer's output there."""
        packed, states = self.pack_new(rows)
        if self._runner is None:
            return states
        hidden = self._runner.run(packed, states)
        self._runner.commit(Kept(packed.request_ids, packed.kv_lens))
        self._have_used(rows)
        return hidden
