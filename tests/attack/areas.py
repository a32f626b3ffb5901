"""Areas of the attack: each pairs a kind of world with a kind of history, by seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from tests.support.backends import CONFIGS as BACKENDS

from .changes import CHANGES
from .histories import History, draw_history
from .judge import Account
from .plain import judged_by_plain
from .runner import run_history
from .worlds import World, draw_world


@dataclass(frozen=True)
class Area:
    """A kind of attack.

    Attributes:
        world: the world of a seed, or ``None`` if its model is refused.
        history: a history in it.
        share: of the time.
        num_histories: in each world.
    """

    world: Callable[[str], World | None]
    history: Callable[[random.Random, World], History]
    share: float
    num_histories: int = 12


# The kinds that are compiled: each takes a minute or so, and is kept in the cache.
_COMPILED = ("llama", "gemma2")
_ROUNDED = ("llama", "mistral", "qwen2", "gemma2", "opt", "gpt2", "gpt_neox", "phi")
_KEEP_STATES = ("qwen3_5_text", "kimi_linear", "jamba", "lfm2", "zamba2")


def _rounded(seed: str) -> World | None:
    """A world in float32 or bfloat16: only ties may differ from the same engine without drafts."""
    dtype = random.Random(f"rounded {seed}").choice((torch.float32, torch.bfloat16))
    world = draw_world(seed, kinds=_ROUNDED, dtype=dtype)
    return world and judged_by_plain(world, BACKENDS[_plain_backend(seed)])


def _compiled(seed: str) -> World | None:
    """One of few shapes, compiled: no bit may differ in bfloat16, in float64 no token from the oracle's."""
    rng = random.Random(f"compiled {seed}")
    kind, dtype = rng.choice(_COMPILED), rng.choice((torch.bfloat16, torch.bfloat16, torch.float64))
    world = draw_world(f"shape {kind}", kinds=(kind,), dtype=dtype, compiled=True, prompts_of=seed)
    return world if world is None or dtype is torch.float64 else judged_by_plain(world, BACKENDS["fused"])


def _invariant(seed: str) -> World | None:
    """Asked for the same bits in any batch: none may differ, whatever the model, its dtype and the history."""
    dtype = random.Random(f"invariant {seed}").choice((torch.float32, torch.bfloat16, torch.float64))
    world = draw_world(seed, dtype=dtype, invariant=True)
    return world and judged_by_plain(world, BACKENDS["fused"])


def _compiled_exact(seed: str) -> World | None:
    """A float64 world with weights of its own, which histories change."""
    return draw_world("shape llama", kinds=("llama",), compiled=True, prompts_of=seed)


def _plain_backend(seed: str) -> str:
    return random.Random(f"backend {seed}").choice(list(BACKENDS))


def _same_backend(rng: random.Random, world: World) -> History:
    """Without preemption: what is computed anew is computed in another shape."""
    backend = _plain_backend(world.name.split(maxsplit=1)[1])
    return replace(draw_history(rng, world), room=None, headroom=None, backend=backend, batching="auto")


def _fused(rng: random.Random, world: World) -> History:
    history = draw_history(rng, world)
    return replace(history, backend="fused" if world.spread == 0.0 else history.backend)


def _changing(rng: random.Random, world: World) -> History:
    """Rounds of one engine, on pages that rows may share, and a change of the model between them."""
    return replace(
        draw_history(rng, world, sampled=rng.random() < 0.3),
        backend=rng.choice(("page 1", "page 1", "page 3", "fused", "padded")),
        batching="auto",
        room=None,
        headroom=None,
        num_drafters=1,
        rounds=rng.choice((2, 3)),
        change=rng.choice(list(CHANGES)),
    )


def _anything(rng: random.Random, world: World) -> History:
    sampled, sins, faults = (rng.random() < share for share in (0.2, 0.3, 0.4))
    return draw_history(rng, world, sampled=sampled, sins=sins, faults=faults)


def _in_threads(rng: random.Random, world: World) -> History:
    history = replace(draw_history(rng, world), policy="all", num_threads=rng.choice((2, 2, 3)))
    return replace(history, rounds=3, close_after=None)


AREAS: dict[str, Area] = {
    "histories": Area(draw_world, draw_history, 0.15),
    "sampled": Area(draw_world, partial(draw_history, sampled=True), 0.1),
    "sins": Area(draw_world, partial(draw_history, sins=True), 0.07),
    "faults": Area(draw_world, partial(draw_history, faults=True), 0.11),
    "foul": Area(partial(draw_world, foul=True), draw_history, 0.09),
    "stops": Area(partial(draw_world, spelt=True), draw_history, 0.08),
    "states": Area(partial(draw_world, kinds=_KEEP_STATES), _anything, 0.1),
    "rounded": Area(_rounded, _same_backend, 0.06),
    "bits": Area(_invariant, _fused, 0.08),
    "compiled": Area(_compiled, _fused, 0.08, num_histories=24),
    "changes": Area(draw_world, _changing, 0.05),
    "recompiled": Area(_compiled_exact, _changing, 0.03),
    "threads": Area(draw_world, _in_threads, 0.08),
}


def cases(area: str, seed: str) -> Iterator[tuple[str, World, History]]:
    """The world of a seed, and history after history in it, each with a name; nothing if the model is refused."""
    world = AREAS[area].world(f"{area} {seed}")
    if world is not None:
        for number in range(AREAS[area].num_histories):
            name = f"{area}/{seed}/{number}"
            yield name, world, AREAS[area].history(random.Random(name), world)


def run_seeds(area: str, seeds: range) -> tuple[Account, int]:
    """The results of some seeds, and how many models were refused."""
    together, refused = Account(), 0
    for seed in seeds:
        is_refused = True
        for name, world, history in cases(area, str(seed)):
            is_refused = False
            account = run_history(world, history)
            account.differences = [f"{name} ({world.name}): {difference}" for difference in account.differences]
            together.add(account)
        refused += is_refused
    return together, refused
