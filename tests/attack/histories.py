"""Histories: requests, an engine's options and how it is driven, drawn at random and as plain data."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any

from emssd.sampling import SamplingParams
from tests.support.backends import CONFIGS as BACKENDS

from .moods import FORMS, MOODS, SHAPES
from .oracle import Ask
from .policies import POLICIES
from .sins import ALL
from .worlds import World

# Where something may fail in the middle of a step.
PLACES = (
    "fits",
    "before plan",
    "after plan",
    "before attention",
    "after attention",
    "after forward",
    "commit",
    "policy",
    "policy observes",
    "propose",
    "observe",
    "release",
)


@dataclass(frozen=True)
class Fault:
    """A disturbance: its place, the visits of the place at which it happens, and its error."""

    place: str
    times: tuple[int, ...]
    error: str = "Planted"


@dataclass(frozen=True)
class History:
    """All that determines one run in a world.

    Attributes:
        asks: the requests.
        room: KV tokens to share; ``None`` for no limit.
        headroom: of a continuous scheduler; ``None`` for the usual, with which few rows are preempted.
        drive: ``"generate"``, ``"run"`` (an iterator, closed after `close_after` texts, and all anew), or ``"step"``.
        moods: keys of `MOODS`, one of which is drawn for each row and step of a drafter, or kept as `manner` says.
        manner: ``"chance"``, ``"row"`` (by place), ``"id"`` (by request id) or ``"step"``.
        form: key of `FORMS`.
        depth: the most tokens that are drafted for a row.
        shapes: keys of `SHAPES`, one of which is drawn for each row and step; without any, chains are drafted.
        sure: whether drafters say how sure they are.
        num_drafters: that are asked in turn.
        sin: one of `sins.ALL`, committed with `chance` in each step.
        rounds: how often all of it, with the same engine.
        change: what happens to the model between two rounds.
        sharing: whether rows share the KV of what they share.
        num_threads: each does all of it at once, with an engine of its own.
    """

    asks: tuple[Ask, ...]
    seed: int = 0
    backend: str = "fused"
    batch_size: int = 4
    batching: str = "auto"
    max_step_tokens: int = 512
    room: int | None = None
    admission: str = "preempt"
    headroom: int | None = None
    on_error: str = "disable"
    drive: str = "step"
    close_after: int | None = None
    moods: tuple[str, ...] = ("right",)
    manner: str = "chance"
    form: str = "plain"
    depth: int = 4
    shapes: tuple[str, ...] = ()
    sure: bool = False
    num_drafters: int = 1
    sin: str = ""
    chance: float = 0.3
    policy: str = "fixed"
    fault: Fault | None = None
    rounds: int = 1
    change: str = ""
    sharing: bool = False
    num_threads: int = 1


def draw_asks(rng: random.Random, world: World, sampled: bool) -> tuple[Ask, ...]:
    asks = []
    for at in range(rng.choice((1, 2, 3, 5, 8, 8))):
        prompt, limit = (
            rng.randrange(len(world.prompts)),
            rng.choice((1, 2, rng.randint(3, 30), rng.randint(10, 30), rng.randint(3, 12))),
        )
        ask = Ask(prompt, limit, arrives=rng.choice((0, 0, rng.randint(0, 12))))
        ask = draw_sampling(rng, world, ask, at) if sampled else ask
        output = world.text_of(ask)[len(world.prompts[prompt]) :]
        if rng.random() < 0.6:  # an EOS that comes, at some place, or one that does not
            eos = [rng.choice((rng.choice(output), rng.randrange(world.vocab_size))) for _ in range(rng.randint(1, 2))]
            ask = replace(ask, eos=tuple(eos))
        if world.speller is not None and rng.random() < 0.8:
            ask = replace(ask, stop=_draw_stops(rng, world, ask, output))
        asks.append(ask)
    return tuple(asks)


def draw_sampling(rng: random.Random, world: World, ask: Ask, at: int) -> Ask:
    """`ask` with a name of its own, and mostly with tokens that are drawn.

    Not with cut-offs where tokens have twins: of two equals, which is cut off is by the last bit.
    """
    options: dict[str, Any] = {
        "top_k": (1, 2, 3, 10),
        "top_p": (0.3, 0.8, 0.95),
        "min_p": (0.05, 0.5),
        "typical_p": (0.3, 0.9),
        "repetition_penalty": (0.7, 1.3),
        "presence_penalty": (-0.5, 1.0),
        "frequency_penalty": (-0.2, 0.6),
        "no_repeat_ngram_size": (2, 3),
        "logit_bias": ({0: 2.0}, {0: -float("inf"), 1: 1.5}),
    }
    if rng.random() < 0.15:
        return ask
    cuts = 4 if world.twins else 0
    names = rng.sample(list(options)[cuts:], rng.choice((0, 0, 1, 2, 3)))
    chosen = {name: rng.choice(options[name]) for name in names}
    temperatures = (0.5, 1.0, 3.0) if "typical_p" in chosen else (0.0, 0.5, 1.0, 1.0, 3.0)
    temperature, seed = rng.choice(temperatures), rng.choice((0, 7, 2**40))
    return replace(ask, name=f"{at}é", sampling=SamplingParams(temperature, seed=seed, **chosen))


def _draw_stops(rng: random.Random, world: World, ask: Ask, output: list[int]) -> tuple[str, ...]:
    """Pieces of the text that comes, wherever they begin; pieces that reach into the prompt; and such as never come."""
    assert world.speller is not None
    spell = world.speller.bytes_of
    before = b"".join(map(spell, world.prompts[ask.prompt][-3:]))
    text = before + b"".join(map(spell, output))
    stops = []
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(max(1, len(text if rng.random() < 0.8 else before)))
        piece = text[start : start + rng.choice((1, 2, 3, 5, 9, 20))]
        string = (
            piece.decode(errors="ignore") if rng.random() < 0.9 else rng.choice(("zzz", "a", "<|end|>", "é", "end"))
        )
        stops.append(string or "ab")
    return tuple(stops)


def _crowded(rng: random.Random, world: World, history: History, sampled: bool) -> History:
    """More rows at once, which grow for longer, than there is room for: some are preempted."""
    asks = tuple(
        Ask(rng.randrange(len(world.prompts)), rng.randint(12, 30), arrives=rng.choice((0, 0, 5)))
        for _ in range(rng.randint(3, 7))
    )
    if sampled:
        asks = tuple(draw_sampling(rng, world, ask, at) for at, ask in enumerate(asks))
    longest = max(len(world.text_of(ask)) for ask in asks)
    page = rng.choice(("page 1", "page 3", "fused", "torch"))
    return replace(
        history,
        asks=asks,
        backend=page,
        batching="auto",
        batch_size=rng.choice((3, 8)),
        room=longest + rng.choice((0, 8, 20)),
        headroom=0,
        admission="preempt",
    )


def draw_history(
    rng: random.Random, world: World, *, sins: bool = False, faults: bool = False, sampled: bool = False
) -> History:
    """A random history in `world`; with a drafter that breaks the rules, a fault in the middle, or tokens drawn."""
    asks = draw_asks(rng, world, sampled)
    backend = rng.choice((*BACKENDS, "fused", "fused", "padded"))
    padded = backend.startswith(("padded", "unpad"))
    batching = rng.choice(("auto", "auto", "static") if padded else ("auto", "auto", "continuous", "static"))
    longest = max(len(world.text_of(ask)) for ask in asks)
    moods = [mood for mood in MOODS if mood != "foul" or world.foul]
    room = None
    if not padded and rng.random() < 0.6:  # enough for the longest alone, and seldom for all
        room = -(-longest // 16) * 16 + rng.choice((0, 0, 16, 32, longest))
    history = History(
        asks,
        seed=rng.getrandbits(32),
        backend=backend,
        batch_size=rng.choice((1, 2, 3, 4, 8, 8)),
        batching=batching,
        max_step_tokens=rng.choice((1, 3, 8, 20, 512)),
        room=room,
        admission=rng.choice(("preempt", "preempt", "preempt", "worst_case")),
        headroom=None if room is None else rng.choice((None, 0, 0, 3)),
        on_error=rng.choice(("disable", "fail")),
        drive=rng.choice(("generate", "run", "step", "step")),
        close_after=rng.choice((None, None, 0, 1, 2)),
        moods=(rng.choice(("right", *moods)), *rng.choices(moods, k=rng.randint(1, 3))),
        manner=rng.choice(("chance", "row", "id", "step")),
        form=rng.choice(list(FORMS)),
        depth=rng.choice((0, 1, 2, 4, 7, 7, 12, 40)),
        num_drafters=rng.choice((1, 1, 2, 3)),
        policy=rng.choice(("fixed", "fixed", "adaptive", *POLICIES)),
        rounds=rng.choice((1, 1, 2)),
    )
    if not padded and rng.random() < 0.3:
        history = _crowded(rng, world, history, sampled)
    if world.foul:
        history = replace(history, moods=(*history.moods, "foul"))
    if sins:
        history = replace(history, sin=rng.choice(ALL), chance=rng.choice((0.1, 0.3, 1.0)), depth=max(2, history.depth))
    if faults:
        times = tuple(sorted(rng.sample(range(1, 12), rng.randint(1, 3))))
        error = rng.choice(("Planted", "Planted", "KeyboardInterrupt", "OutOfMemoryError", "SystemExit"))
        fault = Fault(rng.choice(PLACES), times, error)
        history = replace(history, fault=fault, drive="step", rounds=1)
    if rng.random() < 0.6:
        shapes = tuple(rng.choices(list(SHAPES), k=rng.randint(1, 3)))
        history = replace(history, shapes=shapes, depth=rng.choice((history.depth, 2 * history.depth, 9, 20)))
    if sampled and history.drive == "generate":  # it takes one set of options for all
        history = replace(history, drive="run")
    return replace(history, sure=rng.random() < 0.3, sharing=rng.random() < 0.4)


def differing_fields(history: History) -> str:
    """The fields of a history that differ from their defaults."""
    plain = History(history.asks)
    changed = [field.name for field in fields(History) if getattr(history, field.name) != getattr(plain, field.name)]
    return ", ".join([f"asks={history.asks}", *(f"{name}={getattr(history, name)!r}" for name in changed)])
