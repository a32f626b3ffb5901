"""Areas of the attack: each pairs a kind of world with a kind of history, by seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from tests.support.backends import CONFIGS as BACKENDS

from .changes import CHANGES
from .histories import History, draw_history
from .judge import Account
from .plain import judged_by_plain
from .runner import run_history
from .worlds import World, draw_world

__all__ = ["AREAS", "Area", "Case"]


@dataclass(frozen=True)
class Area:
    """A kind of attack.

    Attributes:
        about: what it is, in a few words.
        world: the world of a seed, or ``None`` if its model is refused.
        history: a history in it.
        share: of the time; 0 where it must be asked for.
        num_histories: in each world.
    """

    about: str
    world: Callable[[str], World | None]
    history: Callable[[random.Random, World], History]
    share: float
    num_histories: int = 12


@dataclass(frozen=True)
class Case:
    """A history in a world, by seed; what a command can run again."""

    area: str
    seed: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.area}/{self.seed}/{self.number}"


# The kinds that are compiled: each takes a minute or so, and is kept in the cache.
_COMPILED = ("llama", "gemma2")
_KEEP_STATES = ("qwen3_5_text", "kimi_linear", "jamba", "lfm2", "zamba2")


def _exact(seed: str) -> World | None:
    return draw_world(seed)


def _rounded(seed: str) -> World | None:
    """A world in float32 or bfloat16: only ties may differ from the same engine without drafts."""
    rng = random.Random(f"rounded {seed}")
    kinds = ("llama", "mistral", "qwen2", "gemma2", "opt", "gpt2", "gpt_neox", "phi")
    world = draw_world(seed, kinds=kinds, dtype=rng.choice((torch.float32, torch.bfloat16)))
    return world and judged_by_plain(world, BACKENDS[_plain_backend(seed)])


def _compiled(seed: str) -> World | None:
    """One of few shapes, compiled: no bit may differ in bfloat16, in float64 no token from the oracle's."""
    rng = random.Random(f"compiled {seed}")
    kind, dtype = rng.choice(_COMPILED), rng.choice((torch.bfloat16, torch.bfloat16, torch.float64))
    world = draw_world(f"shape {kind}", kinds=(kind,), dtype=dtype, compiled=True, prompts_of=seed)
    if world is None or dtype is torch.float64:
        return world
    return judged_by_plain(world, BACKENDS["fused"])


def _invariant(seed: str) -> World | None:
    """Asked for the same bits in any batch: none may differ, whatever the model, its dtype and the history."""
    dtype = random.Random(f"invariant {seed}").choice((torch.float32, torch.bfloat16, torch.float64))
    world = draw_world(seed, dtype=dtype, invariant=True)
    return world and judged_by_plain(world, BACKENDS["fused"])


def _compiled_exact(seed: str) -> World | None:
    """A float64 world with its own weights, which histories change."""
    return draw_world("shape llama", kinds=("llama",), compiled=True, prompts_of=seed)


def _plain_backend(seed: str) -> str:
    return random.Random(f"backend {seed}").choice(list(BACKENDS))


def _same_backend(rng: random.Random, world: World) -> History:
    """Without preemption: what is computed anew is computed in another shape."""
    name = world.name.split(maxsplit=1)[1]
    history = replace(draw_history(rng, world), room=None, headroom=None, backend=_plain_backend(name))
    return replace(history, batching="auto")


def _fused(rng: random.Random, world: World) -> History:
    history = draw_history(rng, world)
    return replace(history, backend="fused" if world.spread == 0.0 else history.backend)


def _changing(rng: random.Random, world: World) -> History:
    """Rounds of one engine, on pages that rows may share, and a change of the model between them."""
    history = draw_history(rng, world, sampled=rng.random() < 0.3)
    backend = rng.choice(("page 1", "page 1", "page 3", "fused", "padded"))
    return replace(
        history,
        backend=backend,
        batching="auto",
        room=None,
        headroom=None,
        num_drafters=1,
        rounds=rng.choice((2, 3)),
        change=rng.choice(list(CHANGES)),
    )


def _states(seed: str) -> World | None:
    return draw_world(seed, kinds=_KEEP_STATES)


def _anything(rng: random.Random, world: World) -> History:
    sampled, sins, faults = (rng.random() < share for share in (0.2, 0.3, 0.4))
    return draw_history(rng, world, sampled=sampled, sins=sins, faults=faults)


def _in_threads(rng: random.Random, world: World) -> History:
    history = replace(draw_history(rng, world), policy="all", num_threads=rng.choice((2, 2, 3)))
    return replace(history, rounds=3, close_after=None)


AREAS: dict[str, Area] = {
    "histories": Area("random histories, float64", _exact, draw_history, 0.15),
    "sampled": Area("tokens are drawn", _exact, lambda rng, world: draw_history(rng, world, sampled=True), 0.1),
    "sins": Area("drafters that break the rules", _exact, lambda rng, world: draw_history(rng, world, sins=True), 0.07),
    "faults": Area(
        "failures in the middle of a step", _exact, lambda rng, world: draw_history(rng, world, faults=True), 0.11
    ),
    "foul": Area("embeddings that are not finite", lambda seed: draw_world(seed, foul=True), draw_history, 0.09),
    "stops": Area("stop strings", lambda seed: draw_world(seed, spelt=True), draw_history, 0.08),
    "states": Area("layers that keep a state", _states, _anything, 0.1),
    "rounded": Area("float32 and bfloat16", _rounded, _same_backend, 0.06),
    "bits": Area("asked for bits that no batch changes", _invariant, _fused, 0.08),
    "compiled": Area("compiled, bits in bfloat16", _compiled, _fused, 0.08, num_histories=24),
    "changes": Area("the model changes between two runs", _exact, _changing, 0.05),
    "recompiled": Area("so does a compiled one", _compiled_exact, _changing, 0.03),
    "threads": Area("engines of one model in several threads", _exact, _in_threads, 0.08),
}


def cases(area: str, seed: str) -> Iterator[tuple[Case, World, History]]:
    """The world of a seed, and history after history in it; nothing if the model is refused."""
    world = AREAS[area].world(f"{area} {seed}")
    if world is not None:
        for number in range(AREAS[area].num_histories):
            case = Case(area, seed, number)
            yield case, world, AREAS[area].history(random.Random(case.name), world)


def run_seeds(area: str, seeds: range) -> tuple[Account, int]:
    """All that comes of some seeds, and how many models were refused."""
    together, refused = Account(), 0
    for seed in seeds:
        there = False
        for case, world, history in cases(area, str(seed)):
            there = True
            account = run_history(world, history)
            account.differences = [f"{case.name} ({world.name}): {what}" for what in account.differences]
            together.add(account)
        refused += not there
    return together, refused
