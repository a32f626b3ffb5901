"""What chains and trees share: a draft model with a KV cache of its own, and how much of each row is in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from emssd.attention import Kept
from emssd.decoding.choosing import first_node
from emssd.decoding.packing import pack
from emssd.drafting import Draft, Drafter, GoesOn
from emssd.drafting.levels import with_room
from emssd.model import ModelRunner
from emssd.sampling import SamplingParams
from emssd.sampling.choice import Node
from emssd.sequences import Batch, Row

__all__ = ["CachedRow", "ModelDrafter"]

_GREEDY = Node(SamplingParams(temperature=0.0))


@dataclass(slots=True)
class CachedRow:
    """A sequence as the draft model sees it: the same tokens, but its own count of cached ones.

    Attributes:
        node: where the token behind the newest one is chosen, by the target and so by the draft model.
    """

    request_id: str
    tokens: Seq[int]
    num_cached: int = 0
    node: Node = _GREEDY


class ModelDrafter(Drafter):
    """Drafts with a model that has a KV cache of its own.

    The first of its passes computes whatever the draft model has not cached yet: the prompt at first, later one token,
    or two after a draft that was accepted to its end, whose last token the draft model never saw. So the caches cannot
    drift apart.

    Args:
        runner: the draft model with its KV cache.
        vocab_size: the target's; ids beyond it are never drafted.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._num_cached: dict[str, int] = {}
        self._goes_on: GoesOn | None = None

    def end_by(self, goes_on: GoesOn | None) -> None:
        self._goes_on = goes_on

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self._runner.release(request_ids)
        for request_id in request_ids:
            self._num_cached.pop(request_id, None)

    def _row(self, row: Row) -> CachedRow:
        """`row` as it begins to be drafted for."""
        return CachedRow(row.request_id, row.tokens, self._cached(row), self.node_of(row))

    def node_of(self, row: Row) -> Node:
        """Where the token behind the newest one of `row` is chosen."""
        return self._with_known_bias(first_node(row))

    def _with_known_bias(self, node: Node) -> Node:
        """Ids beyond the draft model's vocabulary cannot be drawn, whatever is added to their logits."""
        size, bias = self._runner.vocab_size, node.params.logit_bias
        if all(token < size for token in bias):
            return node
        known = {token: value for token, value in bias.items() if token < size}
        return replace(node, params=replace(node.params, logit_bias=known))

    def _reach(self, row: Row) -> int:
        """How far to draft: nothing beyond the draft model's length, nor after ids that only the target knows."""
        reach = self._runner.max_model_len - len(row.tokens)
        if reach <= 0 or max(row.tokens[self._cached(row) :]) >= self._runner.vocab_size:
            return 0
        return reach

    def _cached(self, row: Row) -> int:
        """Of the row's tokens, how many need not be computed: all but one at most, as after a step that failed."""
        return min(self._num_cached.get(row.request_id, 0), len(row.tokens) - 1)

    def _limits(self, batch: Batch, budget: Seq[int]) -> list[int]:
        """``[B]`` how long the chains of some rows may be; 0 where the KV cache has no room."""
        limits = [min(limit, self._reach(row)) if limit > 0 else 0 for row, limit in zip(batch, budget, strict=True)]
        kv_lens = [len(row.tokens) + limit - 1 if limit else 0 for row, limit in zip(batch, limits, strict=True)]
        return [limit if fits else 0 for limit, fits in zip(limits, self._with_room(batch, kv_lens), strict=True)]

    def _with_room(self, batch: Batch, kv_lens: Seq[int]) -> list[bool]:
        """Which rows the KV cache has room for, at ``kv_lens [B]`` tokens, beside those that it holds already.

        Rows of length 0 are left out.
        """
        wanted = [(row.request_id, kv_len) for row, kv_len in zip(batch, kv_lens, strict=True)]
        return with_room(self._runner.fits, self._num_cached, wanted)

    def _catch_up(self, rows: list[CachedRow]) -> torch.Tensor:
        """Compute what is not cached. Returns the logits behind the newest token of each row, ``[r, vocab]``."""
        logits = self._runner.run(pack(rows, Draft.empty(len(rows)))).logits
        self._cached_all(rows)
        return self._known(logits)

    def _cached_all(self, rows: list[CachedRow]) -> None:
        """Note that all tokens of some rows are computed."""
        for row in rows:
            self._num_cached[row.request_id] = row.num_cached = len(row.tokens)

    def _known(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the target's ids alone."""
        return logits[:, : self._vocab_size]

    def _keep(self, kv_lens: Mapping[str, int], sources: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """After a step, keep so many tokens' KV of each row, by request id; `sources` as in `Kept`."""
        self._num_cached |= kv_lens
        if kv_lens:
            moved = tuple(sources[request_id] for request_id in kv_lens) if sources else ()
            self._runner.commit(Kept(tuple(kv_lens), tuple(kv_lens.values()), moved))
