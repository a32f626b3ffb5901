"""Tiny float64 targets with remembered references, and every backend, for the tests of all rooms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference

from emssd.attention import AttentionBackend
from emssd.decoding.engine import Engine
from emssd.decoding.scheduler import StaticScheduler
from emssd.drafting import Draft, Drafter, Outcome
from emssd.model import CausalLMRunner, TargetModel
from emssd.sequences import Batch
from tests.support.backends import chosen

# Small vocabularies make rubbish right by chance; untied embeddings keep Gemma from repeating its last token for ever.
MODELS: dict[str, dict[str, Any]] = {
    "opt-5": {"architecture": "opt", "vocab_size": 5},
    "opt-61": {"architecture": "opt", "vocab_size": 61},
    "llama-11": {"architecture": "llama", "vocab_size": 11},
    "mistral-17": {"architecture": "mistral", "vocab_size": 17},
    "gemma2-7": {"architecture": "gemma2", "vocab_size": 7, "tie_word_embeddings": False},
}

# "dense" is slow, and it asserts what the engine owes to a backend
BACKENDS = chosen("ragged-page-3", "paged-grows", "paged-page-1", "paged-page-4")


@dataclass
class Oracle:
    """A target, and what greedy decoding without emssd generates with it."""

    name: str
    target: TargetModel
    _known: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def reference(self, prompt: Iterable[int], max_new_tokens: int, eos: Iterable[int] = ()) -> tuple[int, ...]:
        key = (tuple(prompt), max_new_tokens, frozenset(eos))
        if key not in self._known:
            self._known[key] = tuple(greedy_reference(self.target.model, key[0], max_new_tokens, key[2]))
        return self._known[key]

    def references(self, prompts: Seq[Seq[int]], max_new_tokens: int) -> dict[str, tuple[int, ...]]:
        """References past any EOS by the request ids of `Engine.generate`, so that drafters know what follows."""
        return {str(i): self.reference(prompt, max_new_tokens) for i, prompt in enumerate(prompts)}


class Spy(Drafter):
    """Passes everything on to another drafter and remembers it."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.num_speculative_tokens, self.drafts_trees = inner.num_speculative_tokens, inner.drafts_trees
        self.proposed: list[dict[str, int]] = []  # per step: the KV length that each row's step needs
        self.trace: list[list[tuple[str, int, int]]] = []  # per step: request id, drafted, accepted
        self.released: list[str] = []

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        draft = self.inner.propose(batch, budget)
        self.proposed.append(
            {row.request_id: len(row.tokens) + length for row, length in zip(batch, draft.lengths, strict=True)}
        )
        return draft

    def observe(self, outcome: Outcome) -> None:
        lengths, accepted = outcome.draft.lengths, [len(nodes) for nodes in outcome.accepted]
        self.trace.append(list(zip(outcome.batch.request_ids, lengths, accepted, strict=True)))
        self.inner.observe(outcome)

    def release(self, request_ids: Iterable[str]) -> None:
        self.released += (names := list(request_ids))
        self.inner.release(names)


@pytest.fixture(scope="session")
def oracles() -> Callable[[str], Oracle]:
    """``oracles("opt-5")``: made when first asked for."""
    made: dict[str, Oracle] = {}

    def get(name: str) -> Oracle:
        if name not in made:
            made[name] = Oracle(name, TargetModel(tiny_model(**MODELS[name], max_model_len=64)))
        return made[name]

    return get


@pytest.fixture(scope="session")
def oracle(oracles: Callable[[str], Oracle]) -> Oracle:
    """The target of tests for which one is enough."""
    return oracles("llama-11")


@pytest.fixture(scope="session")
def model_names() -> list[str]:
    return list(MODELS)


@pytest.fixture(scope="session", params=BACKENDS.values(), ids=BACKENDS)
def make_backend(request: pytest.FixtureRequest) -> Callable[[], AttentionBackend]:
    """Every backend in turn."""
    return request.param


@pytest.fixture(scope="session")
def make_ragged() -> Callable[[], AttentionBackend]:
    """The backend of tests for which one is enough."""
    return BACKENDS["ragged-page-16"]


@pytest.fixture(scope="session")
def spy() -> type[Spy]:
    return Spy


@pytest.fixture(scope="session")
def build() -> Callable[..., Engine]:
    """``build(oracle, make_backend, drafter, batch_size=…)``: an engine that counts nothing as EOS unless told."""

    def build_engine(
        oracle: Oracle,
        make_backend: Callable[[], AttentionBackend],
        drafter: Drafter | Seq[Drafter],
        batch_size: int = 4,
        prefix_caching: bool = False,
        **options: Any,
    ) -> Engine:
        trees = any(one.drafts_trees for one in ([drafter] if isinstance(drafter, Drafter) else drafter))
        backend = make_backend()
        spec = dataclasses.replace(oracle.target.kv_cache_spec(batch_size), trees=trees, prefix_caching=prefix_caching)
        continuous = dataclasses.replace(spec, continuous=True)
        if backend.unsupported(continuous):
            options.setdefault("scheduler", StaticScheduler(batch_size))
        else:
            spec = continuous
        backend.allocate(spec)
        options.setdefault("on_drafter_error", "fail")
        return Engine(CausalLMRunner(oracle.target, backend), drafter, batch_size=batch_size, **options)

    return build_engine


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Ragged prompts over the smallest vocabulary, one longer than what short rows attend with."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 5, (length,), generator=generator).tolist() for length in (5, 1, 20, 3, 9)]
