"""Scripts that stand in for a model: who runs, how much is accepted and which token comes next, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from emssd.attention import PackedInputs
from emssd.attention.trees import Parents
from emssd.decoding.scheduler import Fits, Schedule, Scheduler
from emssd.model import BorrowedTarget, ModelOutput
from emssd.sequences import Request, Row
from emssd_testing.choice_runner import ChoiceRunner
from emssd_testing.conformance.setting import BATCH_SIZE

_Text = tuple[int, ...]

__all__ = ["AGREEABLE", "VOCAB_SIZE", "Decision", "Life", "ScriptedRunner", "ScriptedScheduler", "lives"]

VOCAB_SIZE = 7
"""Of the requests without a model."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The event of a row in one of its steps.

    Attributes:
        limit: the most tokens to draft; of a chain, never more than the row has left, less one.
        keep: how many drafted tokens the budget policy lets through.
        agree: how many of them, one after another, the target would have produced itself.
        token: what it says next; another one where a wrong token was drafted that happens to be this one.
        turn: in a token tree, which child it agrees with: bit by bit, level by level, modulo the number of children.
    """

    limit: int
    keep: int
    agree: int
    token: int
    turn: int = 0


AGREEABLE = Decision(limit=9, keep=9, agree=2, token=1)
"""Drafts are asked for, verified, and the first two tokens of each accepted."""


@dataclass(frozen=True, slots=True)
class Life:
    """A request and the step of its arrival; entry ``i`` modulo the script's length decides its ``i``-th step."""

    request: Request
    script: tuple[Decision, ...]
    arrival: int = 0

    def row(self) -> Row:
        return Row(self.request)

    def decision(self, row: Row) -> Decision:
        return self.script[row.num_steps % len(self.script)]


def decisions(vocab_size: int) -> st.SearchStrategy[Decision]:
    """The events of a step: mostly all of a draft is verified, sometimes nothing is asked for or all is trimmed."""
    length = st.sampled_from([9, 9, 9, 3, 2, 1, 0])
    tokens = st.integers(0, vocab_size - 1)
    return st.builds(Decision, length, length, st.integers(0, 9), tokens, st.sampled_from([0, 1, 2, 5]))


@st.composite
def lives(draw: st.DrawFn, vocab_size: int, min_size: int = 1, min_new_tokens: int = 1) -> list[Life]:
    """Requests that come at different times, at most as many as a batch has rows."""
    drawn = []
    for number in range(draw(st.integers(min_size, BATCH_SIZE))):
        pattern = draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=4))
        prompt = (pattern * 20)[: draw(st.sampled_from([1, 2, 3, 6, 12, 20]))]
        eos = draw(st.just(frozenset()) | st.frozensets(st.integers(0, vocab_size - 1), max_size=1))
        request = Request(f"r{number}", tuple(prompt), draw(st.integers(min_new_tokens, 24)), eos)
        script = draw(st.lists(decisions(vocab_size), min_size=1, max_size=5))
        drawn.append(Life(request, tuple(script), draw(st.integers(0, 4))))
    return drawn


class ScriptedScheduler(Scheduler):
    """Hands out `schedule`, if there is one."""

    def __init__(self) -> None:
        super().__init__(batch_size=1)
        self.schedule: Schedule | None = None

    @property
    def has_work(self) -> bool:
        return self.schedule is not None

    def select(self, fits: Fits, num_speculative_tokens: int) -> Schedule:
        assert self.schedule is not None
        return self.schedule


class ScriptedRunner(ChoiceRunner):
    """Accepts as many tokens as the script says. Hidden states are made up from token, position and index."""

    def __init__(self, vocab_size: int, target: BorrowedTarget | None, decisions: Mapping[str, Decision]) -> None:
        super().__init__(vocab_size)
        self._target, self._decisions, self._hidden = target, decisions, tuple[int, ...]()

    def take_hidden(self, indices: Seq[int]) -> None:
        if self._target is None:
            super().take_hidden(indices)
        self._hidden = tuple(indices)

    def run(self, packed: PackedInputs) -> ModelOutput:
        output = super().run(packed)
        if self._target is None or not self._hidden:
            return output
        embedded, positions = self._target.embed(packed.input_ids), packed.position_ids.unsqueeze(1)
        return replace(output, hidden={index: torch.sin(embedded * (index + 2) + positions) for index in self._hidden})

    def choices(self, request_id: str, length: int, drafted: Seq[int], tree: Parents) -> list[int]:
        decision, texts, children = self._decisions[request_id], list[_Text]([()]), dict[_Text, list[int]]()
        for token, parent in zip(drafted, tree, strict=True):
            before = texts[parent + 1]
            texts.append((*before, token))
            children.setdefault(before, []).append(token)
        reply: _Text = ()
        while len(reply) < decision.agree and reply in children:
            tokens = list(dict.fromkeys(children[reply]))  # duplicates continue the text alike
            reply = (*reply, tokens[(decision.turn >> len(reply)) % len(tokens)])
        candidates = (number % self.vocab_size for number in range(decision.token, decision.token + self.vocab_size))
        wrong = children.get(reply, [])
        reply = (*reply, next((token for token in candidates if token not in wrong), decision.token % self.vocab_size))
        return [self._choice(text, reply, decision.token) for text in texts]

    def _choice(self, text: _Text, reply: _Text, token: int) -> int:
        """The token after a text: the script's, or one that depends on the text alone."""
        if len(text) < len(reply) and text == reply[: len(text)]:
            return reply[len(text)]
        return (token + sum(text) + len(text)) % self.vocab_size
