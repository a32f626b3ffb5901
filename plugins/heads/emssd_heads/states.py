"""`StatesDrafter`: drafts from the target's hidden states; `KnownStates`, those of one row."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from emssd.attention import PackedInputs
from emssd.decoding.packing import pack_nodes
from emssd.draft_models import GrowingRow, LevelDrafter
from emssd.draft_models.draft_cache import DraftCache
from emssd.draft_models.growing_tree import GrowingTree
from emssd.draft_models.shapes import Shape
from emssd.drafting import Draft, Outcome
from emssd.model import BorrowedTarget
from emssd.sequences import Batch, Row

__all__ = ["KnownStates", "StatesDrafter"]

_MOST_WAITING = 256  # tokens of a row whose features are not made


@dataclass(slots=True)
class KnownStates:
    """The target's hidden states of one row, as they come; those that were used are dropped, but for the last.

    Attributes:
        num_used: the states of so many tokens were used.
        start: position of the first state that is kept.
        kept: states ``[n, …]`` from there on; ``None`` before the first.
        waiting: hidden states after these, whose features are not made.
        num_waiting: their tokens.
    """

    num_used: int = 0
    start: int = 0
    kept: torch.Tensor | None = None
    waiting: list[torch.Tensor] = field(default_factory=list)
    num_waiting: int = 0

    @property
    def stop(self) -> int:
        """The position after the last state."""
        return self.start + (0 if self.kept is None else len(self.kept))

    def wait(self, start: int, states: torch.Tensor) -> None:
        """Take in the hidden states ``[n, …]`` of tokens from position `start` on, without features."""
        end = self.stop + self.num_waiting
        assert start == end, f"hidden states from position {start} on, and those before end at {end}"
        self.waiting.append(states)
        self.num_waiting += len(states)

    def made(self, features: torch.Tensor) -> None:
        """Take in the features ``[n, …]`` of all hidden states that waited."""
        self.kept = features if self.kept is None else torch.cat([self.kept, features])
        self.waiting, self.num_waiting = [], 0

    def covers(self, num_tokens: int) -> bool:
        """Whether the states of a row's first `num_tokens` tokens are known, and the last of them is kept."""
        return self.start < num_tokens <= self.stop

    def new(self, num_tokens: int) -> torch.Tensor:
        """The states ``[n, …]`` of the first `num_tokens` tokens that were not used yet.

        The last of them is among these also where it was used, as after a step that failed.
        """
        assert self.kept is not None
        return self.kept[min(self.num_used, num_tokens - 1) - self.start : num_tokens - self.start]

    def used(self, num_tokens: int) -> None:
        """Drop the states of the first `num_tokens` tokens, which were used, but for the last."""
        assert self.kept is not None
        self.kept = self.kept[num_tokens - 1 - self.start :].clone()
        self.start, self.num_used = num_tokens - 1, num_tokens


class StatesDrafter(LevelDrafter):
    """Drafts from the target's hidden states, or features that are made of them.

    A row is drafted for once the target has computed all of its tokens but the newest, so not in its first step.

    Args:
        shape: of the trees; one child for each node makes chains.
        layers: the hidden states that are read, in this order, see `emssd.drafting.Drafter.hidden_layers`.
        target: whose embeddings and vocabulary projection may be used.
        cache: the KV of what drafts; ``None`` without a KV cache.
        max_len: tokens of the longest row that it holds.
    """

    reads_all = True
    """Whether the states of all tokens are read, or those of the last one before the newest."""

    def __init__(
        self,
        shape: Shape,
        layers: Seq[int],
        target: BorrowedTarget,
        cache: DraftCache | None = None,
        max_len: int = sys.maxsize,
    ) -> None:
        super().__init__(shape, target.vocab_size, cache)
        self.hidden_layers, self._target, self._max_len = tuple(layers), target, max_len
        # As long as nothing is drafted, hidden states wait, and features are made of many at once.
        self._states: dict[str, KnownStates] = {}

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        if not any(budget):
            return Draft.empty(len(batch))
        self._make_features([row.request_id for row, limit in zip(batch, budget, strict=True) if limit])
        return super().propose(batch, budget)

    def observe(self, outcome: Outcome) -> None:
        """Keep the hidden states of all tokens that the target has computed."""
        if (hidden := outcome.hidden) is None:
            return
        joined = replace(hidden, layers=(0,), states=(torch.cat(hidden.states, dim=-1),))
        for request_id, start, (states,) in joined.rows():
            self._states.setdefault(request_id, KnownStates()).wait(start, states)
        many = [name for name in joined.request_ids if self._states[name].num_waiting > _MOST_WAITING]
        self._make_features(many)

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        if self._cache is not None:
            self._cache.release(request_ids)
        for request_id in request_ids:
            self._states.pop(request_id, None)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features of tokens, ``[n, …]``, from their hidden states ``[n, states * hidden_size]`` side by side."""
        return hidden

    def tree_of(self, row: Row, num_nodes: int, depth: int) -> GrowingTree | None:
        num_known, states = len(row.tokens) - 1, self._states.get(row.request_id)
        reach = self._max_len - num_known
        if states is None or not states.covers(num_known) or reach < 0:
            return None
        return GrowingTree(num_known, num_nodes, depth, min(self.most_cached(num_nodes, depth), reach))

    def most_cached(self, num_nodes: int, depth: int) -> int:
        """The most tokens of a tree with KV."""
        return self.shape.most_cached(num_nodes, depth) if self.caches_nodes else 0

    def pack_new(
        self, rows: Seq[GrowingRow], mask: tuple[int, torch.Tensor] | None = None
    ) -> tuple[PackedInputs, torch.Tensor]:
        """The tokens of `rows` that are not cached, and beside each the feature ``[nnz, …]`` of the token before it.

        With the id and the feature ``[1, …]`` of a `mask`, as many masks follow as the draft has further levels.
        Outputs are for the newest token of each row, and for masks.
        """
        token_ids, features, lengths, kv_lens, logit_rows = list[int](), list[torch.Tensor](), [], [], list[int]()
        for row in rows:
            new, num_masks = self._states[row.request_id].new(row.tree.num_tokens), 0
            token_ids += row.tokens[-len(new) :]  # token i + 1 stands beside the feature of token i
            features.append(new)
            if mask is not None:
                num_masks = row.tree.depth - 1
                token_ids += [mask[0]] * num_masks
                features.append(mask[1].expand(num_masks, -1))
            lengths.append(len(new) + num_masks)
            kv_lens.append(row.tree.num_tokens + num_masks)
            logit_rows += range(len(token_ids) - 1 - num_masks, len(token_ids))
        packed = pack_nodes([row.request_id for row in rows], torch.tensor(token_ids), lengths, kv_lens)
        return packed._replace(logit_rows=torch.tensor(logit_rows)), torch.cat(features)

    def _make_features(self, request_ids: Iterable[str]) -> None:
        waiting = [states for name in request_ids if (states := self._states.get(name)) and states.waiting]
        if not waiting:
            return
        hidden = torch.cat([piece for states in waiting for piece in states.waiting])
        features = torch.split(self.features(hidden), [states.num_waiting for states in waiting])
        for states, made in zip(waiting, features, strict=True):
            states.made(made)
            if not self.reads_all:
                states.used(states.stop)

    def _have_used(self, rows: Seq[GrowingRow]) -> None:
        for row in rows:
            self._states[row.request_id].used(row.tree.num_tokens)
            if self._cache is not None:
                self._cache.held[row.request_id] = row.tree.num_tokens
