"""Drafters made to hurt: right, then wrong; at the edges of every rule; and some that break each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from emssd.drafting import Draft, Drafter, Outcome

from .sins import LATE, SINS, WHEN_TOLD

__all__ = ["FORMS", "MOODS", "HurtfulDrafter"]

# What is drafted for one row: of what will come, room, ids at hand, and a source of chance.
Mood = Callable[[list[int], int, "HurtfulDrafter", random.Random], list[int]]


def _right_then_wrong(coming: list[int], room: int, own: HurtfulDrafter, rng: random.Random) -> list[int]:
    num_right = rng.randint(0, room)
    wrong = [(token + 1) % own.vocab_size for token in coming[num_right:room]]
    return coming[:num_right] + wrong


def _one_wrong(coming: list[int], room: int, own: HurtfulDrafter, rng: random.Random) -> list[int]:
    chain = coming[:room]
    if chain:
        at = rng.randrange(len(chain))
        chain[at] = (chain[at] + rng.randrange(own.vocab_size)) % own.vocab_size
    return chain


def _ends(coming: list[int], room: int, own: HurtfulDrafter, rng: random.Random) -> list[int]:
    chain = coming[:room]
    for at in range(len(chain)):
        if rng.random() < 0.4:
            chain[at] = rng.choice(own.ends)
    return chain


MOODS: dict[str, Mood] = {
    "right": lambda coming, room, own, rng: coming[:room],
    "some": lambda coming, room, own, rng: coming[: rng.randint(0, room)],
    "right then wrong": _right_then_wrong,
    "one wrong": _one_wrong,
    "wrong": lambda coming, room, own, rng: [(token + 1) % own.vocab_size for token in coming[:room]],
    "late": lambda coming, room, own, rng: coming[1 : room + 1],
    "repeat": lambda coming, room, own, rng: coming[:1] * room,
    "ends": _ends,
    "edge": lambda coming, room, own, rng: [rng.choice((0, own.vocab_size - 1)) for _ in range(room)],
    "any": lambda coming, room, own, rng: [rng.randrange(own.vocab_size) for _ in range(room)],
    "none": lambda coming, room, own, rng: [],
    "foul": lambda coming, room, own, rng: (coming[: rng.randint(0, room)] + [rng.choice(own.foul)] * room)[:room],
}


def _strided(ids: list[int]) -> torch.Tensor:
    wide = torch.full((len(ids), 3), -1, dtype=torch.int64)
    wide[:, 1] = torch.tensor(ids, dtype=torch.int64)
    return wide[:, 1]


FORMS: dict[str, Callable[[list[int]], torch.Tensor]] = {
    "plain": lambda ids: torch.tensor(ids, dtype=torch.int64),
    "strided": _strided,
    "a view": lambda ids: torch.tensor([-7, *ids, 10**9], dtype=torch.int64)[1:-1],
    "of numpy": lambda ids: torch.from_numpy(np.array(ids, dtype=np.int64)),
    "expanded": lambda ids: (
        torch.tensor(ids[:1]).expand(len(ids)) if ids and ids == ids[:1] * len(ids) else torch.tensor(ids).long()
    ),
}


class HurtfulDrafter(Drafter):
    """Knows what the target will say, and uses it against the engine.

    Args:
        will_be: ``will_be(request_id)``: the whole right text of a request, past its end.
        vocab_size: of the target.
        seed: of all that it decides.
        depth: the most tokens that it drafts for a row.
        moods: keys of `MOODS`, one of which is drawn for each row and step, or kept as `manner` says.
        manner: ``"chance"``, ``"row"`` (by place), ``"id"`` (by request id) or ``"step"``.
        form: key of `FORMS`.
        ends: ids that end a request.
        foul: ids whose embeddings are not finite.
        sin: one of `sins.ALL`, committed with `chance` in each step.
        faults: see `Watch.faults`.

    Attributes:
        complaints: what it was told or shown and should not have been.
        sins: how often it did what it must not.
        late: to be called between packing and verification.
    """

    def __init__(
        self,
        will_be: Callable[[str], list[int]],
        vocab_size: int,
        *,
        seed: int = 0,
        depth: int = 4,
        moods: Seq[str] = ("right",),
        manner: str = "chance",
        form: str = "plain",
        ends: Seq[int] = (0,),
        foul: Seq[int] = (0,),
        sin: str = "",
        chance: float = 0.3,
        faults: Callable[[str], None] = lambda place: None,
    ) -> None:
        self.num_speculative_tokens = depth
        self.will_be, self.vocab_size, self.ends, self.foul = will_be, vocab_size, ends or (0,), foul or (0,)
        self.moods, self.manner, self.form, self.sin, self.chance = moods, manner, form, sin, chance
        self.rng, self.faults = random.Random(seed), faults
        self.complaints: list[str] = []
        self.sins = self.num_drafted = self.num_steps = 0
        self.late: Callable[[], None] = _nothing
        self.kept: list[Any] = []  # batches and outcomes of before, for those that look back
        self._drafted: dict[str, tuple[int, list[int]]] = {}  # length of the text, and the chain

    def propose(self, batch: Any, budget: Seq[int]) -> Draft:
        self.num_steps += 1
        self.faults("propose")
        chains = []
        for place, (row, room) in enumerate(zip(batch, budget, strict=True)):
            right = self.will_be(row.request_id)
            if list(row.tokens) != right[: len(row.tokens)]:
                self.complaints.append(f"was shown {list(row.tokens)} of {row.request_id}, which goes {right}")
            mood = MOODS[self._mood(place, row.request_id)]
            chains.append(mood(right[len(row.tokens) :], room, self, self.rng)[: max(room, 0)])
            self._drafted[row.request_id] = len(row.tokens), chains[-1]
        draft = Draft.from_chains(chains)
        draft = Draft(FORMS[self.form](draft.token_ids.tolist()), draft.indptr)
        self.num_drafted += draft.token_ids.numel()
        if self.sin and self.rng.random() < self.chance:
            draft = self._sin(batch, budget, draft)
        self.kept = [*self.kept[-3:], batch]
        return draft

    def observe(self, outcome: Outcome) -> None:
        draft, ids = outcome.draft, outcome.draft.token_ids.tolist()
        if not self.sins:  # one that has sinned may have been switched off in between, or spoilt what it reads here
            for row, start, stop, accepted in zip(
                outcome.batch, draft.indptr, draft.indptr[1:], outcome.accepted, strict=False
            ):
                length, made = self._drafted.get(row.request_id, (0, []))
                coming, drafted = self.will_be(row.request_id)[length:], ids[start:stop]
                if drafted != made[: len(drafted)]:
                    self.complaints.append(f"heard that it drafted {drafted} for {row.request_id}, where it had {made}")
                differs = [left != right for left, right in zip(drafted, coming, strict=False)]
                right = [*differs, True].index(True)
                if list(accepted) != list(range(right)):
                    self.complaints.append(
                        f"of {row.request_id} {drafted} was drafted where {coming} comes, and {list(accepted)} accepted"
                    )
        self.faults("observe")
        self._when_told("observe", outcome.batch)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._drafted.pop(request_id, None)
        self._when_told("release", ())

    def _mood(self, place: int, request_id: str) -> str:
        kinds = {
            "chance": self.rng.randrange(len(self.moods)),
            "row": place,
            "id": sum(request_id.encode()),
            "step": self.num_steps,
        }
        return self.moods[kinds[self.manner] % len(self.moods)]

    def _sin(self, batch: Any, budget: Seq[int], draft: Draft) -> Draft:
        if self.sin in SINS and len(batch):
            self.sins += 1
            return SINS[self.sin](self, batch, draft, budget)
        if self.sin in LATE and len(batch):
            self.sins += 1
            ids, offsets = torch.tensor(draft.token_ids.tolist(), dtype=torch.int64), list(draft.indptr)
            draft = Draft(ids, offsets)  # type: ignore[arg-type]  # a list can be changed
            self.late = lambda: LATE[self.sin](self, batch, draft)
        return draft

    def _when_told(self, what: str, batch: Any) -> None:
        when, sin = WHEN_TOLD.get(self.sin, ("", None))
        if when == what and sin is not None and self.rng.random() < self.chance:
            self.sins += 1
            sin(self, batch)


def _nothing() -> None:
    pass
