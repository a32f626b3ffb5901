"""The oracle: the eager model, without a cache, one text at a time, and its own rule of when a text ends."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from emssd_testing.oracle import next_logits

from emssd.sampling import SamplingParams
from tests.support import sampling as by_hand


@dataclass(frozen=True)
class Ask:
    """One request of a history: which of the world's prompts, and when it ends.

    Attributes:
        prompt: index of a prompt of the world.
        limit: of new tokens.
        eos: ids that end it.
        stop: texts that end it.
        arrives: the step before which it is added.
        sampling: how its tokens are chosen; greedily by default.
        name: its request id, which sampled tokens depend on; any where it is empty.
    """

    prompt: int
    limit: int
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    arrives: int = 0
    sampling: SamplingParams | None = None
    name: str = ""


class Oracle:
    """Decoding by definition: for every token the whole text again, and the first of the largest logits, or scores.

    Args:
        model: a causal LM; called as whoever loads it with eager attention calls it.
        max_model_len: no text grows longer.
    """

    def __init__(self, model: Any, max_model_len: int) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._texts: dict[tuple[int, ...], list[int]] = {}
        self._drawn: dict[tuple[object, ...], list[int]] = {}

    def forget(self) -> None:
        """The model is another from now on."""
        self._logits.clear()
        self._texts.clear()
        self._drawn.clear()

    def logits(self, tokens: Seq[int]) -> torch.Tensor:
        """``[vocab]``: what the model says after exactly these tokens."""
        key = tuple(tokens)
        if key not in self._logits:
            self._logits[key] = next_logits(self.model, key).clone()
        return self._logits[key]

    def text(self, prompt: tuple[int, ...], num_new: int) -> list[int]:
        """`prompt` and its greedy continuation by up to `num_new` tokens, past any EOS."""
        tokens = self._texts.setdefault(prompt, list(prompt))
        length = min(len(prompt) + num_new, self.max_model_len)
        while len(tokens) < length:
            tokens.append(int(torch.argmax(self.logits(tokens))))
        return tokens[:length]

    def drawn(self, prompt: tuple[int, ...], num_new: int, params: SamplingParams, name: str) -> list[int]:
        """The text with tokens that the request `name` draws."""
        tokens = self._drawn.setdefault((prompt, params, name), list(prompt))
        length = min(len(prompt) + num_new, self.max_model_len)
        while len(tokens) < length:
            logits = self.logits(tokens).double().tolist()
            tokens.append(by_hand.choice(logits, params, tokens, len(prompt), name))
        return tokens[:length]

    def margin(
        self, tokens: Seq[int], one: int, other: int, params: SamplingParams | None = None, num_prompt: int = 0
    ) -> float:
        """The gap of two logits, plus that of the better one to the best, as a share of the largest in size.

        Given `params`, of logits as these change them.
        """
        logits = self.logits(tokens).double()
        if params is not None:
            logits = logits.new_tensor(by_hand.scores(logits.tolist(), params, tokens, num_prompt))
        best, largest = max(logits[one], logits[other]), logits[logits.isfinite()].abs().max().clamp_min(1e-9)
        return float(((logits[one] - logits[other]).abs() + logits.max() - best) / largest)


def ending(output: Seq[int], ask: Ask, room: int, spelling: Any = None) -> tuple[list[int], str]:
    """Cut a greedy continuation to what `ask` gets; say why it ends.

    Args:
        output: the continuation, as far as limit and room go at least.
        ask: the request.
        room: tokens that the model's length leaves behind the prompt.
        spelling: ``spelling(token)`` are the bytes of a token; needed for stop strings.
    """
    text = b""
    for count, token in enumerate(output, start=1):
        if token in ask.eos:
            return list(output[:count]), "eos"
        if ask.stop:
            text += spelling(token)
            if any(stop.encode() in text for stop in ask.stop):
                return list(output[:count]), "stop"
        if count == min(ask.limit, room):
            return list(output[:count]), "length"
    raise AssertionError("the continuation is shorter than its limit")
