"""Engines with every drafter for random grammars, and what became of the texts that they decoded."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
from emssd_testing.drafters import RandomDrafter, ScriptedBudget, TreeDrafter
from emssd_testing.models import tiny_model

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.drafting.budget import FixedBudget
from emssd.model import TargetModel
from emssd.sampling import SamplingParams
from emssd.sampling.grammar import Grammar
from emssd.sampling.matching import Grammars, MatcherState
from emssd.sequences import FinishReason, Generation, Request
from tests.support.backends import CONFIGS as BACKENDS
from tests.support.every_drafter import COINS, EveryDrafter
from tests.support.every_drafter import DRAFTERS as EVERY
from tests.support.grammars import EOS, is_valid, random_grammar, tokenizer

VOCAB = len(tokenizer()) + 5  # a model's vocabulary is often larger
_LIMIT = 24
Texts = Mapping[str, tuple[int, ...]]
_SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.9},
    {"temperature": 0.8, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"temperature": 1.0, "logit_bias": {20: 3.0, 21: -float("inf")}, "logprobs": 2, "processed_logprobs": True},
]
OWN: dict[str, Any] = {
    "right and wrong trees": lambda texts, seed: TreeDrafter(VOCAB, 9, texts, right=0.8, seed=seed),
    "random trees": lambda texts, seed: TreeDrafter(VOCAB, 6, seed=seed),
    "random chains": lambda texts, seed: RandomDrafter(VOCAB, 5, texts, seed=seed),
}
DRAFTERS = [*OWN, *EVERY, *COINS]


def begun(grammar: Any) -> MatcherState:
    return Grammars(tokenizer(), VOCAB).begin(Grammar.of(grammar), [EOS])


def drafter_of(name: str, texts: Texts, seed: int) -> Any:
    """One of `DRAFTERS`, for rows whose outputs will be `texts`."""
    return OWN[name](texts, seed) if name in OWN else _every().config(name, texts)


@cache
def target() -> TargetModel:
    return TargetModel(tiny_model("llama", vocab_size=VOCAB, max_model_len=96, std=0.15), frozen=True)


@cache
def _every() -> EveryDrafter:
    return EveryDrafter(target())


def make_engine(
    drafter: Any = "none",
    backend: Any = "page 3",
    batch_size: int = 3,
    *,
    max_tokens: int | None = None,
    budget: Any = None,
    **options: Any,
) -> Engine:
    """See `EveryDrafter.engine`."""
    chosen = EngineOptions(batch_size, max_step_tokens=64, **options)
    return _every().engine(drafter, backend, chosen, tokenizer(), budget=budget, max_tokens=max_tokens or 0, eos=[EOS])


def requests(grammars: Seq[Any], limit: int = _LIMIT, *, each: Seq[dict[str, Any]] = ({},), **common: Any) -> list[Any]:
    """A request for each grammar, with the options of `SamplingParams` that all have, and those `each` has in turn."""
    options = [common | each[row % len(each)] for row in range(len(grammars))]
    return [
        Request(
            str(row), (40 + row % 50, 50, 60), limit, frozenset([EOS]), sampling=SamplingParams(grammar=text, **how)
        )
        for row, (text, how) in enumerate(zip(grammars, options, strict=True))
    ]


def decode(engine: Engine, wanted: Seq[Request]) -> dict[str, Generation]:
    return {done.request_id: done for done in engine.run(wanted)}


@cache
def _plain() -> Engine:
    return make_engine(batch_size=1, force_tokens=False)


def plainly(wanted: Seq[Request]) -> dict[str, Generation]:
    """One row at a time, without any draft."""
    results = decode(_plain(), wanted)
    assert _plain().report.num_drafted == 0
    return results


@dataclass
class Tally:
    """Counts per drafter and over all texts."""

    texts: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    grammars: set[str] = field(default_factory=set)
    ended: int = 0
    preempted: int = 0


def check(seed: int, num_rows: int, tally: Tally) -> None:
    """Decode `num_rows` random grammars with one of the drafters, in any batch, on any backend, and count them.

    Raises:
        AssertionError: a text differs from that of the run without drafts, or is not one of its grammar.
    """
    draw, name = random.Random(seed), DRAFTERS[seed % len(DRAFTERS)]
    grammars = [random_grammar(seed * 1000 + row) for row in range(num_rows)]
    turned = [*_SAMPLINGS[seed % len(_SAMPLINGS) :], *_SAMPLINGS]
    wanted = requests(grammars, seed=seed, each=turned[: draw.choice([1, 5])])
    expected = plainly(wanted)
    texts = {row: done.token_ids for row, done in expected.items()}
    policies = [FixedBudget, FixedBudget, partial(ScriptedBudget, [(9, 9), (3, 2), (0, 0), (9, 1)])]
    backend, crowded = draw.choice([("page 1", True), ("page 3", True)] * 2 + [(each, False) for each in BACKENDS])
    engine = make_engine(
        drafter_of(name, texts, seed),
        backend,
        draw.choice([3, 4] if crowded else [1, 2, 3, 4]),
        max_tokens=_LIMIT + 3 if crowded else None,
        budget=draw.choice(policies)(),
    )
    results = decode(engine, wanted)
    for row, grammar in enumerate(grammars):
        done, plain = results[str(row)], expected[str(row)]
        assert done.token_ids == plain.token_ids, (name, grammar)
        assert done.finish_reason is plain.finish_reason
        if done.finish_reason is FinishReason.EOS:
            assert is_valid(done.text or "", grammar), (grammar, done.text)
        assert done.logprobs is None or all(np.isfinite(each.logprob) for each in done.logprobs)
        tally.ended += done.finish_reason is FinishReason.EOS
    tally.texts[name] += num_rows
    tally.accepted[name] += engine.report.num_accepted
    tally.grammars |= {f"{grammar.kind} {grammar.text}" for grammar in grammars}
    tally.preempted += engine.report.num_preempted
