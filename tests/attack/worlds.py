"""A world: a model, its oracle, prompts, and what an engine shows of itself while it runs."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from emssd.attention import StepPlan
from emssd.decoding.engine import Engine
from emssd.errors import UnsupportedModelError
from emssd.model import ModelOptions, TargetModel
from emssd.model.run.target import Computed

from .oracle import Ask, Oracle
from .spellings import Speller, draw_speller
from .zoo import KINDS, MAY_BE_REFUSED, draw_model

_FOUL = (float("nan"), float("nan"), float("inf"), float("-inf"), 1e300, 1e30)


class Planted(Exception):  # noqa: N818  # no error of the project's
    """A fault that the attack itself threw into the works."""


@dataclass
class World:
    """The shared part of histories.

    Attributes:
        foul: ids whose embeddings are not finite.
        twins: whether tokens have others of the same logit.
        spread: how far logits may be from the oracle's, as a share of the largest; ``None``: they are not compared.
        judge: the oracle of logits, if it is another.
        tie: the largest distance of two tokens' logits that is a tie, as a share of the largest logit.
    """

    name: str
    model: Any
    target: TargetModel
    oracle: Oracle
    prompts: list[tuple[int, ...]]
    speller: Speller | None = None
    foul: tuple[int, ...] = ()
    twins: bool = False
    spread: float | None = 1e-4  # norms compute in float32, whatever the dtype, and layers amplify that
    tie: float = 1e-6  # as above
    judge: Oracle | None = None

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def has_no_say(self, ask: Ask) -> bool:
        """Whether the oracle is no judge: eager attention smears what is not finite over windows, too."""
        windows = any(layer.sliding_window for layer in self.target.layers)
        return windows and any(token in self.foul for token in self.text_of(ask))

    def text_of(self, ask: Ask) -> list[int]:
        """The prompt and its right continuation, past any end but the limit."""
        prompt = self.prompts[ask.prompt]
        if ask.sampling is not None:
            return self.oracle.drawn(prompt, ask.limit, ask.sampling, ask.name)
        return self.oracle.text(prompt, ask.limit)


def draw_world(
    seed: str,
    *,
    kinds: Iterable[str] = KINDS,
    dtype: torch.dtype = torch.float64,
    spelt: bool = False,
    foul: bool = False,
    compiled: bool = False,
    invariant: bool = False,
    prompts_of: str | None = None,
) -> World | None:
    """A random world, the same for the same seed; ``None`` if its model is refused, as it may be.

    Args:
        seed: of everything, or of all but the prompts, with `prompts_of`.
        kinds: keys of `KINDS`, one of which it gets.
        dtype: of the model.
        spelt: whether it has a tokenizer.
        foul: whether some embeddings are not finite.
        compiled: whether the model is.
        invariant: whether it is asked for the same bits in any batch.
        prompts_of: seed of the prompts.
    """
    rng = random.Random(seed)
    kind = rng.choice(sorted(kinds))
    max_model_len = rng.choice((40, 64, 64, 100) if compiled or rng.random() < 0.9 else (700,))
    speller = draw_speller(rng) if spelt else None
    vocab_size = speller.num_tokens + rng.choice((0, 3)) if speller else rng.choice((3, 7, 13, 31, 50))
    model = draw_model(rng, kind, vocab_size=vocab_size, max_model_len=max_model_len, dtype=dtype)
    if twins := rng.random() < 0.04:
        twin(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target = TargetModel(model, ModelOptions(compile=compiled, batch_invariant=invariant))
    except UnsupportedModelError:
        if kind in MAY_BE_REFUSED:
            return None
        raise
    ids = tuple(rng.sample(range(vocab_size), rng.randint(1, 2))) if foul and vocab_size > 3 else ()
    for token in ids:
        spoil(model, token, rng.choice(_FOUL))
    clean = [token for token in range(vocab_size) if token not in ids or rng.random() < 0.3]
    rng = rng if prompts_of is None else random.Random(prompts_of)
    prompts = []
    for _ in range(8):
        length = rng.choice((1, 2, rng.randint(3, 12), rng.randint(10, max_model_len // 2), rng.randint(1, 30)))
        if max_model_len > 600:  # beyond what kernels take as one block
            length = rng.choice((length, rng.randint(480, 640)))
        some = rng.sample(clean, min(len(clean), rng.randint(1, 6)))
        prompts.append(tuple(rng.choice(some) for _ in range(length)))
    return World(f"{kind} {seed}", model, target, Oracle(model, max_model_len), prompts, speller, ids, twins)


def spoil(model: Any, token: int, value: float) -> None:
    """Give `token` an embedding of nothing but `value`; what is projected on the vocabulary stays as it is."""
    _untied_projection(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = value


def twin(model: Any) -> None:
    """Give every token another of the same logit: a tie at every place."""
    weight = _untied_projection(model)
    half = len(weight) // 2
    with torch.no_grad():
        weight[half : 2 * half] = weight[:half]


def _untied_projection(model: Any) -> torch.nn.Parameter:
    """``[vocab, hidden]``: the vocabulary projection, apart from the embeddings."""
    projection = model.get_output_embeddings()
    if projection.weight is model.get_input_embeddings().weight:
        projection.weight = torch.nn.Parameter(projection.weight.detach().clone())
    weight: torch.nn.Parameter = projection.weight
    return weight


@dataclass
class Watch:
    """A view of one engine, and the faults that are planted into it.

    Attributes:
        packed: the step that was planned last.
        steps: of each step, its fed tokens and the target's logits.
        faults: ``faults(place)`` is called at every place where one may be planted.
        between: called between packing and verification.
    """

    faults: Callable[[str], None] = lambda place: None
    between: Callable[[], None] = lambda: None
    packed: Any = None
    steps: list[tuple[Any, torch.Tensor]] = field(default_factory=list)


class WatchedTarget:
    """The target, whose logits are noted."""

    def __init__(self, inner: TargetModel, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *inputs: Any, **options: Any) -> Computed:
        computed = self._inner(*inputs, **options)
        self._watch.steps.append((self._watch.packed, computed.logits.clone()))
        self._watch.faults("after forward")
        return computed


def watched(engine: Engine, watch: Watch) -> Engine:
    """The engine as it is, whose steps are noted, and may fail in the middle."""
    runner: Any = engine.runner
    runner.model, backend = WatchedTarget(runner.model, watch), runner.backend
    plan, attend, fits, commit = backend.plan, backend.forward, backend.fits, backend.commit

    def planned(packed: Any) -> StepPlan:
        watch.faults("before plan")
        watch.packed = packed
        made: StepPlan = plan(packed)
        watch.faults("after plan")
        watch.between()
        return made

    def attended(*inputs: Any) -> torch.Tensor:
        watch.faults("before attention")
        out: torch.Tensor = attend(*inputs)
        watch.faults("after attention")
        return out

    backend.plan, backend.forward = planned, attended
    backend.fits = lambda kv_lens: (watch.faults("fits"), fits(kv_lens))[1]
    backend.commit = lambda kept: (watch.faults("commit"), commit(kept))[1]
    return engine
