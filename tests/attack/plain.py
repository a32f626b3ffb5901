"""An oracle of bits: what the engine itself says without drafts, one text at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from typing import Any

import torch
from emssd_testing.oracle import next_logits

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions

from .drafters import HurtfulDrafter
from .histories import History
from .oracle import Oracle
from .worlds import Watch, World, watched

# Of the largest logit: where `docs/exactness.md` calls a difference a tie.
TIES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-6}

# Of the largest logit: what rounding in another order may come to in a tiny model with large weights.
_SPREADS = {torch.float64: 1e-4, torch.float32: 1e-2, torch.bfloat16: 0.25}


class PlainOracle(Oracle):
    """Texts and logits of an engine that drafts nothing, at batch size 1.

    A margin is the lesser of its own and the eager model's: two roundings of one model, and neither is nearer to it.
    One of less than both of them are off is none.

    Args:
        world: whose target decodes.
        backend: its config.
    """

    def __init__(self, world: World, backend: object) -> None:
        super().__init__(world.model, world.oracle.max_model_len)
        self.eager = world.oracle
        self._watch = Watch()
        drafter = HurtfulDrafter(History((), depth=0, moods=("none",)), lambda request_id: [], world.vocab_size)
        options = EngineOptions(batch_size=1, prefix_caching=False)
        made = Engine.assemble(
            world.target, None, drafter=drafter, backend=backend, budget="fixed", options=options, eos=()
        )
        self._engine = watched(made, self._watch)

    def promises_bits(self) -> bool:
        """Whether a row has the same bits in any batch, as runs of this engine say."""
        self.text((1,), 1)  # what a model calls is known when it was called
        return self._engine.runner.batch_invariance == "yes"

    def text(self, prompt: tuple[int, ...], num_new: int) -> list[int]:
        length = min(len(prompt) + num_new, self.max_model_len)
        if len(self._texts.get(prompt, ())) < length:
            self._watch.steps.clear()
            (done,) = self._engine.generate([prompt], length - len(prompt))
            text = [*prompt, *done.token_ids]
            for at, (_, logits) in enumerate(self._watch.steps[-len(done.token_ids) :]):
                self._logits[tuple(text[: len(prompt) + at])] = logits[-1]
            self._texts[prompt] = text
        return self._texts[prompt][:length]

    def margin(self, tokens: Seq[int], one: int, other: int, *changed: Any) -> float:
        margin = self.eager.margin(tokens, one, other, *changed)
        if tuple(tokens) in self._logits:
            margin = min(margin, super().margin(tokens, one, other, *changed))
        return 0.0 if margin <= 2 * self._rounding(tokens) else margin

    def _rounding(self, tokens: Seq[int]) -> float:
        """How far the eager model is off itself in float64, as a share of the largest logit: some texts amplify it."""
        exact = next_logits(copy.deepcopy(self.model).double(), tuple(tokens))
        return float((self.eager.logits(tokens).double() - exact).abs().max() / exact.abs().max().clamp_min(1e-9))


def judged_by_plain(world: World, backend: object) -> World:
    """`world` with an oracle of bits: no logit may differ where that is promised, else only by ties."""
    oracle = PlainOracle(world, backend)
    promised = oracle.promises_bits()
    if not promised:
        world.judge = world.oracle  # what no bit is promised of must still be about right
    world.oracle = oracle
    world.spread = 0.0 if promised else _SPREADS[world.target.dtype]
    world.tie = 0.0 if promised else TIES[world.target.dtype]
    return world
