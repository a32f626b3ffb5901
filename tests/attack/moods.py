"""Chains and token trees made to hurt: where they are right, ids at the edges, and who stands beside the right path."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

# What is drafted for one row: of what will come, room, ids at hand, and a source of chance.
Mood = Callable[[list[int], int, Any, random.Random], list[int]]


def _right_then_wrong(coming: list[int], room: int, me: Any, rng: random.Random) -> list[int]:
    num_right = rng.randint(0, room)
    wrong = [(token + 1) % me.vocab_size for token in coming[num_right:room]]
    return coming[:num_right] + wrong


def _one_wrong(coming: list[int], room: int, me: Any, rng: random.Random) -> list[int]:
    chain = coming[:room]
    if chain:
        at = rng.randrange(len(chain))
        chain[at] = (chain[at] + rng.randrange(me.vocab_size)) % me.vocab_size
    return chain


def _ends(coming: list[int], room: int, me: Any, rng: random.Random) -> list[int]:
    chain = coming[:room]
    for at in range(len(chain)):
        if rng.random() < 0.4:
            chain[at] = rng.choice(me.ends)
    return chain


MOODS: dict[str, Mood] = {
    "right": lambda coming, room, me, rng: coming[:room],
    "some": lambda coming, room, me, rng: coming[: rng.randint(0, room)],
    "right then wrong": _right_then_wrong,
    "one wrong": _one_wrong,
    "wrong": lambda coming, room, me, rng: [(token + 1) % me.vocab_size for token in coming[:room]],
    "late": lambda coming, room, me, rng: coming[1 : room + 1],
    "repeat": lambda coming, room, me, rng: coming[:1] * room,
    "ends": _ends,
    "edge": lambda coming, room, me, rng: [rng.choice((0, me.vocab_size - 1)) for _ in range(room)],
    "any": lambda coming, room, me, rng: [rng.randrange(me.vocab_size) for _ in range(room)],
    "none": lambda coming, room, me, rng: [],
    "foul": lambda coming, room, me, rng: (coming[: rng.randint(0, room)] + [rng.choice(me.foul)] * room)[:room],
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


Tree = list[tuple[int, int]]  # of each node its token and the index of its parent, or -1

# What grows around a path: of the path, room for nodes, the drafter, and a source of chance.
Shape = Callable[[list[int], int, Any, random.Random], Tree]


def tree(shape: str, path: list[int], room: int, deepest: int, me: Any, rng: random.Random) -> Tree:
    """At most `room` nodes, none of them deeper than `deepest`, around the tokens `path`."""
    grown = SHAPES[shape](path, room, me, rng)
    if rng.random() < 0.5:
        grown = _shuffled(grown, rng)
    return shallow(grown, deepest)[:room]


def shallow(nodes: Seq[tuple[Any, ...]], deepest: int) -> list[Any]:
    """The nodes that are no deeper; a node is a tuple, and its second entry is its parent."""
    depths: list[int] = []
    places = {-1: -1}
    kept = []
    for node, (token, parent, *others) in enumerate(nodes):
        depths.append(1 if parent < 0 else depths[parent] + 1)
        if depths[-1] <= deepest:
            places[node] = len(kept)
            kept.append((token, places[parent], *others))
    return kept


def right_depths(nodes: Seq[tuple[Any, ...]], coming: Seq[int]) -> list[int]:
    """The depth of each node if all tokens from the root to it are those that come, else 0."""
    depths: list[int] = []
    for token, parent, *_ in nodes:
        before = 0 if parent < 0 else depths[parent]
        is_right = (parent < 0 or before > 0) and before < len(coming) and token == coming[before]
        depths.append(before + 1 if is_right else 0)
    return depths


def best_path(nodes: Seq[tuple[Any, ...]], depths: Seq[int]) -> list[int]:
    """The path from the root to the first of the deepest right nodes."""
    node = max(range(len(nodes)), key=lambda node: (depths[node], -node)) if any(depths) else -1
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = nodes[node][1]
    return path[::-1]


def _chain(path: list[int], room: int, me: Any, rng: random.Random) -> Tree:
    return [(token, node - 1) for node, token in enumerate(path)]


def _siblings(path: list[int], room: int, me: Any, rng: random.Random) -> Tree:
    tokens = [rng.choice((*path[:1], _noise(me, rng))) for _ in range(room)]
    return [(token, -1) for token in tokens]


def _twins(path: list[int], room: int, me: Any, rng: random.Random) -> Tree:
    """Each token of the path is drafted several times, and any of its twins may have the next ones as children."""
    grown, before = Tree(), [-1]
    for token in path:
        twins = rng.randint(1, 3)
        grown += [(token, rng.choice(before)) for _ in range(twins)]
        before = list(range(len(grown) - twins, len(grown)))
    return grown


def _forest(path: list[int], room: int, me: Any, rng: random.Random) -> Tree:
    """Chains side by side, the path among them, the others like it up to some place; level by level."""
    chains = [
        [*path[: rng.randint(0, len(path))], *_noises(me, rng, rng.randint(0, 3))] for _ in range(rng.randint(1, 4))
    ]
    chains.insert(rng.randint(0, len(chains)), path)
    grown, ends = Tree(), [-1] * len(chains)
    for level in range(max(map(len, chains))):
        for at, chain in enumerate(chains):
            if level < len(chain):
                grown.append((chain[level], ends[at]))
                ends[at] = len(grown) - 1
    return grown


def _twice(path: list[int], room: int, me: Any, rng: random.Random) -> Tree:
    """The path, or a beginning of it, before the whole of it; perhaps with another below the first."""
    begun = _chain(path[: rng.randint(0, len(path))], room, me, rng)
    begun += [(token, len(begun) - 1) for token in _noises(me, rng, rng.randint(0, 2))]
    again = [(token, -1 if parent < 0 else len(begun) + parent) for token, parent in _chain(path, room, me, rng)]
    return begun + again


def _comb(path: list[int], room: int, me: Any, rng: random.Random) -> Tree:
    """Each token of the path stands after wrong siblings."""
    grown, before = Tree(), -1
    for token in path:
        grown += [(noise, before) for noise in _noises(me, rng, rng.randint(0, 2))]
        grown.append((token, before))
        before = len(grown) - 1
    return grown


def _bushy(path: list[int], room: int, me: Any, rng: random.Random) -> Tree:
    """The path, and anything below any of its nodes and theirs."""
    grown = _chain(path, room, me, rng)
    while len(grown) < room:
        grown.append((_noise(me, rng), rng.randint(-1, len(grown) - 1)))
    return _shuffled(grown, rng)


def _any(path: list[int], room: int, me: Any, rng: random.Random) -> Tree:
    """Any shape, in which right tokens are found wherever the path to them is right."""
    grown, depths = Tree(), {-1: 0}  # of nodes on the path
    for node in range(room):
        parent = rng.randint(-1, node - 1)
        depth = depths.get(parent, len(path))
        token = path[depth] if depth < len(path) and rng.random() < 0.6 else _noise(me, rng)
        if depth < len(path) and token == path[depth]:
            depths[node] = depth + 1
        grown.append((token, parent))
    return grown


SHAPES: dict[str, Shape] = {
    "chain": _chain,
    "siblings": _siblings,
    "twins": _twins,
    "forest": _forest,
    "twice": _twice,
    "comb": _comb,
    "bushy": _bushy,
    "any": _any,
}


def _noise(me: Any, rng: random.Random) -> int:
    """Any token; often one of a few, so that siblings are equal, or one whose embedding is not finite."""
    token: int = rng.choice((rng.randrange(me.vocab_size), rng.choice(me.foul), rng.choice(me.ends)))
    return token


def _noises(me: Any, rng: random.Random, count: int) -> list[int]:
    return [_noise(me, rng) for _ in range(count)]


def _shuffled(nodes: Tree, rng: random.Random) -> Tree:
    """The same tree in any order that has parents before their children."""
    children: dict[int, list[int]] = {}
    for node, (_, parent) in enumerate(nodes):
        children.setdefault(parent, []).append(node)
    ready, places, shuffled = list(children.get(-1, ())), {-1: -1}, Tree()
    while ready:
        node = ready.pop(rng.randrange(len(ready)))
        places[node] = len(shuffled)
        shuffled.append((nodes[node][0], places[nodes[node][1]]))
        ready += children.get(node, ())
    return shuffled
