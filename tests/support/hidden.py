"""A drafter that writes down all hidden states that it hears of, and holds them to one plain pass of the model."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import torch

from emssd.drafting import Draft, Drafter, Outcome
from emssd.sequences import Batch, Row

CLOSE = 1e-9  # of numbers around one, in float64 throughout


@torch.inference_mode()
def right_states(model: Any, tokens: Seq[int], layers: Seq[int]) -> list[torch.Tensor]:
    """``[len(tokens), width]`` for each of `layers`, by Transformers' ``output_hidden_states``, without a cache.

    It tells index ``n`` of ``n`` after the final norm only, so that -1 stands for that, and ``n`` is not there. Eager
    attention takes its softmax in float32, and SDPA knows no soft-cap.
    """
    before = model.config._attn_implementation
    model.config._attn_implementation = "sdpa"
    try:
        states = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False).hidden_states
    finally:
        model.config._attn_implementation = before
    assert not {*layers} & {len(states) - 1}
    return [states[layer][0] for layer in layers]


class Listener(Drafter):
    """Drafts what another drafter does, and hears hidden states.

    Each delivery must begin where the one before it ended, or at 0 where a row begins, or begins anew.

    Args:
        inner: the other drafter.
        layers: which hidden states.

    Attributes:
        heard: by request id the states of rows that run, one list for each layer.
        finished: the tokens of rows that ended, by request id, and their states ``[n, width]``.
        deliveries: by request id, how many tokens came in each delivery.
        num_again: how many rows began anew.
    """

    def __init__(self, inner: Drafter, layers: tuple[int, ...] = (0, 1, -1)) -> None:
        self.inner, self.hidden_layers = inner, layers
        self.drafts_trees = inner.drafts_trees
        self.heard: dict[str, list[list[torch.Tensor]]] = {}
        self.finished: dict[str, tuple[list[int], list[torch.Tensor]]] = {}
        self.deliveries: dict[str, list[int]] = {}
        self.num_again = self.num_without_batch = 0

    @property
    def num_speculative_tokens(self) -> int:  # type: ignore[override]  # that of the other
        return self.inner.num_speculative_tokens

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return self.inner.propose(batch, budget)

    def observe(self, outcome: Outcome) -> None:
        hidden = outcome.hidden
        assert hidden is not None
        assert hidden.layers == self.hidden_layers
        assert {*outcome.batch.request_ids} <= {*hidden.request_ids}
        self.num_without_batch += not outcome.batch
        for name, start, states in hidden.rows():
            mine = self.heard.setdefault(name, [[] for _ in self.hidden_layers])
            assert start == sum(map(len, mine[0])), f"{name} goes on at {start}"
            for one, more in zip(mine, states, strict=True):
                one.append(more)
            self.deliveries.setdefault(name, []).append(len(states[0]))
        for row in outcome.batch:
            self._check(row)
        if outcome.batch:
            self.inner.observe(outcome)

    def _check(self, row: Row) -> None:
        """A row has the states of all of its tokens but the newest; if it was cut by an EOS, maybe those of that."""
        states = [torch.cat(parts) for parts in self.heard[row.request_id]]
        assert len(states[0]) in ({len(row.tokens) - 1} | ({len(row.tokens)} if row.finish_reason else set()))
        if row.finish_reason is not None:
            self.finished[row.request_id] = list(row.tokens), states

    def release(self, request_ids: Iterable[str]) -> None:
        names = list(request_ids)
        for name in names:
            self.num_again += self.heard.pop(name, None) is not None and name not in self.finished
        self.inner.release(names)

    def hold_to(self, model: Any, name: str) -> None:
        """All that was heard of a row that ended is what one plain pass over its tokens computes.

        Raises:
            AssertionError: it is not.
        """
        tokens, got = self.finished.pop(name)
        right = right_states(model, tokens, self.hidden_layers)
        for layer, mine, true in zip(self.hidden_layers, got, right, strict=True):
            difference = float((mine - true[: len(mine)]).abs().max())
            assert difference < CLOSE, f"hidden states {layer} of {name} are off by {difference}"
