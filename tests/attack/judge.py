"""Compares what came out of an engine with the oracle, and counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from emssd_testing.oracle import seen

from emssd.attention import PackedInputs

from .oracle import Ask, ending
from .worlds import World


@dataclass
class Account:
    """A history's result.

    Attributes:
        differences: sentences about what was wrong.
        num_tokens, num_logits: compared with the oracle.
        num_nodes: of these logits, those after a node of a tree with branches.
        num_moved: rows whose accepted nodes were not the first ones of their tree, over all steps.
    """

    differences: list[str] = field(default_factory=list)
    num_texts: int = 0
    num_tokens: int = 0
    num_logits: int = 0
    num_nodes: int = 0
    num_moved: int = 0
    num_ties: int = 0
    num_preempted: int = 0
    num_adopted: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_raised: int = 0

    def add(self, other: Account) -> None:
        """Count what came of another history as well."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Judge:
    """Compares the output of an engine with the oracle.

    Args:
        world: with the oracle.
        asks: by request id.
        account: where it is counted.
    """

    def __init__(self, world: World, asks: dict[str, Ask], account: Account) -> None:
        self.world, self.asks, self.account = world, asks, account
        self._tied: dict[str, int] = {}  # length of a text up to a tie

    def wrong(self, difference: str) -> None:
        """Count a difference."""
        self.account.differences.append(difference)

    def texts(self, got: dict[str, tuple[list[int], str]], ended: bool) -> None:
        """Compare what came out, ``{request_id: (tokens, reason)}``; not all need have, if the run `ended` early."""
        world = self.world
        for request_id, ask in self.asks.items():
            prompt = world.prompts[ask.prompt]
            room = world.oracle.max_model_len - len(prompt)
            spelling = world.speller.bytes_of if world.speller else None
            right, reason = ending(world.text_of(ask)[len(prompt) :], ask, room, spelling)
            if request_id not in got:
                if world.twins:  # it may have taken the other of two equals, and nobody knows where
                    self._tied[request_id] = len(prompt)
                if not ended:
                    self.wrong(f"{request_id!r} never came out")
                continue
            tokens, got_reason = got[request_id]
            self.account.num_texts += 1
            self.account.num_tokens += len(right)
            if (tokens, got_reason) == (right, reason) or world.has_no_say(ask):
                continue
            at = [*(one != other for one, other in zip(tokens, right, strict=False)), True].index(True)
            is_greedy = ask.sampling is None or ask.sampling.temperature == 0
            if is_greedy and at < min(len(tokens), len(right)):
                changed = () if ask.sampling is None else (ask.sampling, len(prompt))
                margin = world.oracle.margin([*prompt, *right[:at]], tokens[at], right[at], *changed)
                if margin <= world.tie:
                    self.account.num_ties += 1
                    self._tied[request_id] = min(self._tied.get(request_id, len(prompt) + at), len(prompt) + at)
                    continue
            self.wrong(f"{request_id!r} of {list(prompt)}: {tokens} ({got_reason}), and {right} ({reason}) is right")

    def text_before_stop(self, done: Any) -> None:
        """Compare the text of a generation that a stop string ended."""
        ask, speller = self.asks[done.request_id], self.world.speller
        if speller is None or done.finish_reason.value != "stop":
            return
        text = speller.text_before_stop(done.token_ids, ask.stop)
        if text is not None and text != done.text:
            self.wrong(f"{ask.stop} ends {list(done.token_ids)}: its text is {done.text!r}, and {text!r} is right")

    @torch.inference_mode()
    def logits(self, steps: Iterable[tuple[PackedInputs, torch.Tensor]]) -> None:
        """Compare the target's logits after each right beginning to the oracle's, within a `spread` of the largest."""
        if self.world.spread is None:
            return
        oracle = self.world.judge or self.world.oracle
        texts, largest = {request_id: self.world.text_of(ask) for request_id, ask in self.asks.items()}, 0.0
        for packed, logits in steps:
            row = 0
            for fed_index, line in zip(packed.logit_rows.tolist(), logits, strict=True):
                while packed.qo_indptr[row + 1] <= fed_index:
                    row += 1
                name, (num_before, fed) = packed.request_ids[row], _text_to(packed, row, fed_index)
                text = texts[name][: num_before + len(fed)]
                if len(text) > self._tied.get(name, math.inf):
                    continue  # after a tie, its text may be another
                if fed != text[num_before:]:
                    continue  # after a wrong draft
                right = oracle.logits(text)
                if not right.isfinite().all():
                    continue
                self.account.num_logits += 1
                self.account.num_nodes += bool(packed.trees) and fed_index >= packed.qo_indptr[row + 1] - len(
                    packed.trees[row]
                )
                largest = max(largest, float(right.abs().max()))  # logits that nearly cancel are rounded as others are
                off = float((line - right).abs().max()) / max(largest, 1e-9)  # all may be 0
                if not off <= self.world.spread:
                    self.wrong(f"logits of {name!r} after {len(text)} tokens are off by {off:.3g}")
                    return


def _text_to(packed: PackedInputs, row: int, fed_index: int) -> tuple[int, list[int]]:
    """The fed tokens on the path to a fed token, and how many tokens of the text come before them."""
    first, end = packed.qo_indptr[row : row + 2]
    num_before = packed.kv_lens[row] - (end - first)
    path = seen(packed, row, num_before + fed_index - first)  # by the parents alone: neither positions nor masks
    ids = packed.input_ids[first:end].tolist()
    return num_before, [ids[index - num_before] for index in path if index >= num_before]
