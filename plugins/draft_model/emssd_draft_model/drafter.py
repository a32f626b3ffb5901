"""Drafts with a smaller model for the whole batch at once, through a runner like the target's.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", greedy; batched as in the EMS-SD
paper, §4.3.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from emssd.attention import Kept
from emssd.attention.transfer import on_device
from emssd.decoding.packing import pack, pack_nodes
from emssd.decoding.verify import greedy_tokens
from emssd.drafting import Draft, Drafter, DrafterContext, Outcome
from emssd.errors import ConfigError
from emssd.model import ModelRunner
from emssd.sequences import Batch, Sequence
from emssd_draft_model import DraftModelConfig

__all__ = ["DraftModelDrafter"]


@dataclass(slots=True)
class _Row:
    """A sequence as the draft model sees it: the same tokens, but its own count of cached ones."""

    request_id: str
    tokens: Seq[int]
    num_cached: int = 0


class DraftModelDrafter(Drafter):
    """Greedy drafting with a model that has a KV cache of its own.

    The first of its passes computes whatever the draft model has not cached yet: the prompt at first, later one token,
    or two after a fully accepted draft, whose last token the draft model never saw. So the caches cannot drift apart.

    Args:
        runner: the draft model with its KV cache.
        vocab_size: the target's; ids beyond it are never drafted.
        num_speculative_tokens: tokens per row and step.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, num_speculative_tokens: int) -> None:
        if num_speculative_tokens < 1:
            raise ConfigError(f"drafter.num_speculative_tokens is {num_speculative_tokens}; it must be at least 1")
        self.num_speculative_tokens = num_speculative_tokens
        self._runner = runner
        self._vocab_size = vocab_size
        self._num_cached: dict[str, int] = {}
        self._num_drafted: dict[str, int] = {}  # since the last rollback

    @classmethod
    def load(cls, config: DraftModelConfig, context: DrafterContext) -> DraftModelDrafter:
        """Load the model of `config`.

        Raises:
            ConfigError: it does not share the target's vocabulary.
        """
        runner, tokenizer = context.load_runner(config.path)
        _check_vocabulary(config.path, runner, tokenizer, context)
        return cls(runner, context.vocab_size, config.num_speculative_tokens)

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        limits = self._with_room(batch, [self._limit(row, limit) for row, limit in zip(batch, budget, strict=True)])
        rows = [
            _Row(row.request_id, row.tokens, self._cached(row))
            for row, limit in zip(batch, limits, strict=True)
            if limit > 0
        ]
        if not rows:
            return Draft.empty(len(batch))
        wanted = [limit for limit in limits if limit > 0]
        self._num_drafted = {row.request_id: limit for row, limit in zip(rows, wanted, strict=True)}
        columns = [self._catch_up(rows)]
        for depth in range(1, max(wanted)):
            columns.append(self._next(rows, wanted, columns[-1], depth))
        return _ragged(limits, torch.stack(columns, dim=1))

    def observe(self, outcome: Outcome) -> None:
        """Keep the KV of accepted tokens, drop the rest: every row rolls back by its own number."""
        request_ids = []
        for row, accepted in zip(outcome.batch, outcome.accepted, strict=True):
            if length := self._num_drafted.pop(row.request_id, 0):
                # Before the step the draft model had cached all tokens and then all of its draft but the last.
                self._num_cached[row.request_id] += min(len(accepted), length - 1)
                request_ids.append(row.request_id)
        if request_ids:
            kv_lens = tuple(self._num_cached[request_id] for request_id in request_ids)
            self._runner.commit(Kept(tuple(request_ids), kv_lens))

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self._runner.release(request_ids)
        for request_id in request_ids:
            self._num_cached.pop(request_id, None)
            self._num_drafted.pop(request_id, None)

    def _limit(self, row: Sequence, budget: int) -> int:
        """How much to draft: nothing beyond the draft model's length, nor after ids that only the target knows."""
        limit = min(budget, self._runner.max_model_len - len(row.tokens))
        if limit <= 0 or max(row.tokens[self._cached(row) :]) >= self._runner.vocab_size:
            return 0
        return limit

    def _cached(self, row: Sequence) -> int:
        """Of the row's tokens, how many need not be computed: all but one at most, as after a step that failed."""
        return min(self._num_cached.get(row.request_id, 0), len(row.tokens) - 1)

    def _with_room(self, batch: Batch, limits: list[int]) -> list[int]:
        """`limits`, and 0 for rows that the KV cache has no room for beside those that it holds already."""
        lengths = {
            row.request_id: len(row.tokens) + limit - 1 for row, limit in zip(batch, limits, strict=True) if limit
        }
        if self._runner.fits(self._num_cached | lengths):
            return limits
        held, kept = dict(self._num_cached), []
        for row, limit in zip(batch, limits, strict=True):
            more = {row.request_id: lengths[row.request_id]} if limit else {}
            fits = self._runner.fits(held | more)
            held |= more if fits else {}
            kept.append(limit if fits else 0)
        return kept

    def _catch_up(self, rows: list[_Row]) -> torch.Tensor:
        """Compute what is not cached. Returns the first drafted token of each row, ``[r]``."""
        packed = pack(rows, Draft.empty(len(rows)))
        tokens = self._argmax(self._runner.run(packed).logits)
        for row in rows:
            self._num_cached[row.request_id] = row.num_cached = len(row.tokens)
        return tokens

    def _next(self, rows: list[_Row], wanted: list[int], tokens: torch.Tensor, depth: int) -> torch.Tensor:
        """One token further for the rows that want more than `depth`. Returns ``[r]``; other rows hold their old."""
        active = [i for i, limit in enumerate(wanted) if limit > depth]
        names = [rows[i].request_id for i in active]
        kv_lens = [len(rows[i].tokens) + depth for i in active]
        if len(active) == len(rows):
            packed = pack_nodes(names, tokens, [1] * len(names), kv_lens)
            return self._argmax(self._runner.run(packed).logits)
        index = on_device(active, tokens.device)
        packed = pack_nodes(names, tokens[index], [1] * len(names), kv_lens)
        return tokens.index_copy(0, index, self._argmax(self._runner.run(packed).logits))

    def _argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return greedy_tokens(logits[:, : self._vocab_size])


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


def _check_vocabulary(path: str, model: ModelRunner, tokenizer: Any, context: DrafterContext) -> None:
    if tokenizer is not None and context.tokenizer is not None:
        if tokenizer.get_vocab() == context.tokenizer.get_vocab():
            return  # vocabulary sizes of the models may still differ by unused padding ids
        what = f"its tokenizer ({len(tokenizer)} tokens) is not the target's ({len(context.tokenizer)} tokens)"
    elif model.vocab_size == context.vocab_size:
        return
    else:
        what = f"its vocabulary has {model.vocab_size} tokens and the target's {context.vocab_size}"
    raise ConfigError(
        f"draft model {path!r} cannot draft for this target: {what}. Set drafter.path to a model that was trained "
        f"with the target's tokenizer, usually a smaller one of the same family."
    )
