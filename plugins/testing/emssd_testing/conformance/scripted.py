"""An engine without a model: a script decides who runs, what is accepted and which token comes next, step by step.

So a plugin can be driven through any legal order of calls in microseconds, and the same calls can be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from hypothesis import strategies as st

from emssd.attention import PackedInputs
from emssd.attention.trees import Parents
from emssd.decoding.engine import Engine
from emssd.decoding.outcome import StepTimer
from emssd.decoding.scheduler import Fits, Prefill, Schedule, Scheduler
from emssd.drafting import BudgetPolicy, Drafter
from emssd.model import BorrowedTarget, ModelOutput
from emssd.sequences import Batch, Request, Row
from emssd_testing.choice_runner import ChoiceRunner
from emssd_testing.conformance.rules import named
from emssd_testing.conformance.setting import BATCH_SIZE

_Text = tuple[int, ...]

__all__ = ["AGREEABLE", "Decision", "Life", "ScriptedEngine", "World", "decision", "lives"]


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
        """As it begins."""
        return Row(self.request)


def decision(row: Row, life: Life) -> Decision:
    """The event of `row` in its next step."""
    return life.script[row.num_steps % len(life.script)]


def in_turn(lives: Seq[Life], step: Callable[[list[Row], list[Decision]], list[Row]]) -> None:
    """All of `lives` through `step`, which returns the rows that go on, each from its arrival to its end."""
    rows, number, waiting = list[Row](), 0, sorted(lives, key=lambda life: life.arrival)
    by_id = {life.request.request_id: life for life in lives}
    while rows or waiting:
        while waiting and (waiting[0].arrival <= number or not rows):
            rows.append(waiting.pop(0).row())
        rows.reverse()  # no row may count on its place
        rows = step(rows, [decision(row, by_id[row.request_id]) for row in rows])
        number += 1


def decisions(vocab_size: int) -> st.SearchStrategy[Decision]:
    """The events of a step: mostly all of a draft is verified, sometimes nothing is asked for or all is trimmed."""
    length = st.sampled_from([9, 9, 9, 3, 2, 1, 0])
    turn = st.sampled_from([0, 1, 2, 5])
    return st.builds(Decision, length, length, st.integers(0, 9), st.integers(0, vocab_size - 1), turn)


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


class ScriptedEngine(Engine):
    """`Engine.step` for the rows and with the `decisions` of a script, by request id."""

    def __init__(
        self,
        drafters: Seq[Drafter],
        policy: BudgetPolicy,
        vocab_size: int,
        make_timer: Callable[[], StepTimer] = StepTimer,
        target: BorrowedTarget | None = None,
    ) -> None:
        self.decisions: dict[str, Decision] = {}
        self._scripted = _ScriptedScheduler()
        super().__init__(
            _ScriptedRunner(vocab_size, target, self.decisions),
            drafters,
            scheduler=self._scripted,
            budget=policy,
            on_drafter_error="fail",
            make_timer=make_timer,
        )

    def tell(self, rows: Seq[Row], decisions: Seq[Decision]) -> list[int]:
        """Make these the decisions of the step. Returns ``[B]`` the most tokens to draft for each row."""
        self.decisions.clear()
        self.decisions.update(zip((row.request_id for row in rows), decisions, strict=True))
        most, trees = self.drafting.num_speculative_tokens, self.drafting.drafts_trees
        depths = [max(0, row.num_remaining - 1) for row in rows]
        lengths = [most if trees and depth else min(most, depth) for depth in depths]
        return [min(each.limit, length) for each, length in zip(decisions, lengths, strict=True)]

    def take(self, rows: Seq[Row], decisions: Seq[Decision], num_prefill: int = 0) -> list[Row]:
        """One step, beside `num_prefill` tokens of another prompt. Returns the rows that go on."""
        other = Row(Request("emssd.other", (1,) * (num_prefill + 1), 1))
        pieces = (Prefill(other, num_prefill),) if num_prefill else ()
        self._scripted.schedule = Schedule(Batch(tuple(rows)), tuple(self.tell(rows, decisions)), pieces)
        try:
            self.step()
        finally:
            self._scripted.schedule = None
        return [row for row in rows if row.finish_reason is None]


class World:
    """Plugins in a scripted engine.

    Attributes:
        kind: of the plugins; whatever a call raises breaks its rule ``KIND.raises``.
        piece: tokens of another prompt that run beside the rows of every third step of `live`.
    """

    kind: ClassVar[str]
    piece: ClassVar[int] = 0

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self._num_steps = 0

    def step(self, rows: Seq[Row], decisions: Seq[Decision], num_prefill: int = 0) -> list[Row]:
        """Draft, verify as scripted, notify the plugins, and release rows that end; see `ScriptedEngine.take`."""
        self._num_steps += 1
        with named(f"{self.kind}.raises", "a step"):
            return self.engine.take(rows, decisions, num_prefill)

    def release(self, request_ids: Iterable[str]) -> None:
        """Notify the plugins that these requests are gone, if there are any."""
        if names := list(request_ids):
            with named(f"{self.kind}.raises", "a step"):
                self.engine.drafting.release(names)

    def live(self, lives: Seq[Life]) -> Self:
        """All of `lives`, each from its arrival to its end."""
        in_turn(lives, lambda rows, decisions: self.step(rows, decisions, self.piece * (self._num_steps % 3 == 1)))
        return self


class _ScriptedScheduler(Scheduler):
    def __init__(self) -> None:
        super().__init__(batch_size=1)
        self.schedule: Schedule | None = None

    @property
    def has_work(self) -> bool:
        return self.schedule is not None

    def select(self, fits: Fits, num_speculative_tokens: int) -> Schedule:
        assert self.schedule is not None
        return self.schedule


class _ScriptedRunner(ChoiceRunner):
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
        said: _Text = ()
        while len(said) < decision.agree and said in children:
            tokens = list(dict.fromkeys(children[said]))  # duplicates continue the text alike
            said = (*said, tokens[(decision.turn >> len(said)) % len(tokens)])
        others = (number % self.vocab_size for number in range(decision.token, decision.token + self.vocab_size))
        wrong = children.get(said, [])
        said = (*said, next((token for token in others if token not in wrong), decision.token % self.vocab_size))
        return [self._choice(text, said, decision.token) for text in texts]

    def _choice(self, text: _Text, said: _Text, token: int) -> int:
        """The token after a text: that of the script, or else something that depends on the text alone."""
        if len(text) < len(said) and text == said[: len(text)]:
            return said[len(text)]
        return (token + sum(text) + len(text)) % self.vocab_size
