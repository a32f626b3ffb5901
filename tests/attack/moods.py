"""Chains made to hurt: right, then wrong; ends, and ids at the edges; and the forms that a tensor of ids can have."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["FORMS", "MOODS", "Mood"]

# What is drafted for one row: of what will come, room, ids at hand, and a source of chance.
Mood = Callable[[list[int], int, Any, random.Random], list[int]]


def _right_then_wrong(coming: list[int], room: int, own: Any, rng: random.Random) -> list[int]:
    num_right = rng.randint(0, room)
    wrong = [(token + 1) % own.vocab_size for token in coming[num_right:room]]
    return coming[:num_right] + wrong


def _one_wrong(coming: list[int], room: int, own: Any, rng: random.Random) -> list[int]:
    chain = coming[:room]
    if chain:
        at = rng.randrange(len(chain))
        chain[at] = (chain[at] + rng.randrange(own.vocab_size)) % own.vocab_size
    return chain


def _ends(coming: list[int], room: int, own: Any, rng: random.Random) -> list[int]:
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
