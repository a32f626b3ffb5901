"""Tiny float64 targets with remembered references, and engines on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference

from emssd.attention import AttentionBackend
from emssd.decoding.engine import Engine
from emssd.decoding.scheduler import StaticScheduler
from emssd.drafting import Drafter
from emssd.model import CausalLMRunner, TargetModel

# Small vocabularies make rubbish right by chance; untied embeddings keep Gemma from repeating its last token for ever.
MODELS: dict[str, dict[str, Any]] = {
    "opt-5": {"architecture": "opt", "vocab_size": 5},
    "opt-61": {"architecture": "opt", "vocab_size": 61},
    "llama-11": {"architecture": "llama", "vocab_size": 11},
    "mistral-17": {"architecture": "mistral", "vocab_size": 17},
    "gemma2-7": {"architecture": "gemma2", "vocab_size": 7, "tie_word_embeddings": False},
}


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


@cache
def oracle_of(name: str) -> Oracle:
    """One of `MODELS`."""
    return Oracle(name, TargetModel(tiny_model(**MODELS[name], max_model_len=64)))


def build(
    oracle: Oracle,
    make_backend: Callable[[], AttentionBackend],
    drafter: Drafter | Seq[Drafter],
    batch_size: int = 4,
    prefix_caching: bool = False,
    **options: Any,
) -> Engine:
    """An engine that raises what drafters raise, and counts nothing as EOS unless it is told to."""
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
