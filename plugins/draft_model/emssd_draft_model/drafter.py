"""Drafts chains with a smaller model for the whole batch at once, through a runner like the target's.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; batched as in the EMS-SD paper,
§4.3. Sampled with the noise of the target, as in Daliri et al. 2024, arXiv 2408.07978, §4.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from emssd.attention import on_device, to_host
from emssd.drafters import (
    DynamicShape,
    GrowingRow,
    ModelDrafter,
    Node,
    behind,
    choose,
    greedy_tokens,
    pack,
    pack_nodes,
)
from emssd.drafting import Draft, Outcome
from emssd.model import Growth, ModelRunner
from emssd.sequences import Batch

__all__ = ["DraftModelDrafter"]


class DraftModelDrafter(ModelDrafter):
    """Drafts chains: at each node the token that the draft model would choose if it were the target.

    The drafted ids stay on the device, so that the host waits for none of the passes, unless a row has penalties, which
    read them. For the same reason a chain has no confidence. Where a budget policy ends drafts between passes, chains
    are trees without branches, and have one.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, num_speculative_tokens: int) -> None:
        super().__init__(runner, vocab_size, DynamicShape(num_speculative_tokens, num_speculative_tokens, 1))
        self._num_drafted: dict[str, int] = {}  # since the last rollback

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._num_drafted = {}
        if self._goes_on is not None:
            return super().propose(batch, budget)
        rows = self._begin(batch, budget)
        if not rows:
            return Draft.empty(len(batch))
        wanted = [row.tree.depth for row in rows]
        self._num_drafted = {row.request_id: length for row, length in zip(rows, wanted, strict=True)}
        return _ragged([self._num_drafted.get(row.request_id, 0) for row in batch], self._chains(rows, wanted))

    def observe(self, outcome: Outcome) -> None:
        """Keep the KV of accepted tokens, drop the rest: every row rolls back by its own number."""
        if self._goes_on is not None:
            super().observe(outcome)
            return
        names, kv_lens = list[str](), list[int]()
        for row, accepted in zip(outcome.batch, outcome.accepted, strict=True):
            if length := self._num_drafted.pop(row.request_id, 0):
                # Before the step the draft model had cached all tokens and then all of its draft but the last.
                names.append(row.request_id)
                kv_lens.append(self._cache.held[row.request_id] + min(len(accepted), length - 1))
        self._keep(names, kv_lens)

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        super().release(request_ids)
        for request_id in request_ids:
            self._num_drafted.pop(request_id, None)

    def _chains(self, rows: list[GrowingRow], wanted: list[int]) -> torch.Tensor:
        """``[r, k]`` drafted tokens; anything stands after what a row wants."""
        if not self.has_own_ids and all(row.node.params.is_greedy for row in rows):
            packed = pack(rows, Draft.empty(len(rows)))
            if (found := self._runner.grow(packed, Growth.chains(wanted, self._vocab_size))) is not None:
                self._have_cached(rows)
                tokens = torch.zeros(max(wanted), len(rows), dtype=torch.int64)
                tokens[torch.arange(max(wanted))[:, None] < torch.tensor(wanted)] = found[0].flatten()
                return tokens.T
        columns = [_chosen(self.catch_up(rows), [row.node for row in rows])]
        columns += self._greedy_behind(rows, wanted, columns[0])
        while len(columns) < max(wanted):
            columns.append(self._next(rows, wanted, columns))
        return torch.stack(columns, dim=1)

    def _greedy_behind(self, rows: list[GrowingRow], wanted: list[int], first: torch.Tensor) -> list[torch.Tensor]:
        """The columns after the first, if they can be computed in one call."""
        active = [i for i, limit in enumerate(wanted) if limit > 1]
        is_greedy = all(row.node.params.is_greedy for row in rows)
        if not active or not is_greedy or self.has_own_ids or not self.plans_passes:
            return []
        index = on_device(active, first.device)
        growth = Growth.chains([wanted[i] - 1 for i in active], self._vocab_size)
        found = self.passes([rows[i] for i in active], first[index], growth, active)
        return [] if found is None else [first.index_copy(0, index, column) for column in found[0].long()]

    def _next(self, rows: list[GrowingRow], wanted: list[int], columns: list[torch.Tensor]) -> torch.Tensor:
        """One token after `columns`, for the rows that want more. Returns ``[r]``; other rows hold their old."""
        tokens, active = columns[-1], [i for i, limit in enumerate(wanted) if limit > len(columns)]
        if len(active) == len(rows):
            return self._chosen_behind(rows, columns)
        index = on_device(active, tokens.device)
        chosen = self._chosen_behind([rows[i] for i in active], [column[index] for column in columns])
        return tokens.index_copy(0, index, chosen)

    def _chosen_behind(self, rows: list[GrowingRow], columns: list[torch.Tensor]) -> torch.Tensor:
        """Compute the newest of the drafted ``columns [depth, r]``. Returns ``[r]``, what is chosen after them."""
        depth, nodes = len(columns), [row.node for row in rows]
        paths: list[list[int]] = [[]] * len(rows)
        if any(node.params.reads_path for node in nodes):
            drafted = to_host(torch.stack(columns, dim=1).flatten())
            paths = [drafted[start : start + depth] for start in range(0, len(drafted), depth)]
        kv_lens = [len(row.tokens) + depth for row in rows]
        packed = pack_nodes([row.request_id for row in rows], self.own_ids(columns[-1]), [1] * len(rows), kv_lens)
        logits = self._columns(self._runner.run(packed).logits)
        return _chosen(logits, [behind(node, depth, path) for node, path in zip(nodes, paths, strict=True)])


def _chosen(logits: torch.Tensor, nodes: Seq[Node]) -> torch.Tensor:
    """``[r]`` what would be chosen at `nodes` if the target's logits were these ``[r, vocab]``."""
    return greedy_tokens(logits) if all(node.params.is_greedy for node in nodes) else choose(logits, nodes)


def _ragged(lengths: list[int], tokens: torch.Tensor) -> Draft:
    """Cut ``tokens [r, k]``, the rows that drafted, to each row's length."""
    indptr = [0]
    for length in lengths:
        indptr.append(indptr[-1] + length)
    drafting = [length for length in lengths if length > 0]
    width = tokens.shape[1]
    if all(length == width for length in drafting):
        return Draft(tokens.flatten(), tuple(indptr))
    index = [row * width + column for row, length in enumerate(drafting) for column in range(length)]
    return Draft(tokens.flatten()[on_device(index, tokens.device)], tuple(indptr))
