"""Whole runs of an engine that Hypothesis draws, beside what the target generates alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from hypothesis import strategies as st

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.decoding.engine import Engine
from emssd.decoding.scheduler import ContinuousScheduler, Scheduler, StaticScheduler
from emssd.drafting import BudgetPolicy, Drafter
from emssd.model import CausalLMRunner
from emssd.sequences import Request
from emssd.testing.conformance.rules import broken, named
from emssd.testing.conformance.setting import (
    BATCH_SIZE,
    NEW_TOKENS,
    Setting,
    drafters_of,
    setting,
    texts,
)
from emssd.testing.strategies import policies

__all__ = ["Run", "decode", "runs"]

_VOCAB_SIZES = (5, 11, 61)  # in a small vocabulary a guess is right by chance


@dataclass(frozen=True, slots=True)
class Run:
    """Requests, and how an engine is to run them.

    Attributes:
        max_tokens: limit of the KV cache, so that rows are preempted; ``None`` for no limit.
        max_step_tokens: beyond it prompts are computed in pieces.
    """

    setting: Setting
    requests: tuple[Request, ...]
    batch_size: int
    max_step_tokens: int
    max_tokens: int | None
    policy: BudgetPolicy

    def allocate(
        self, make_backend: Callable[[], AttentionBackend], *, trees: bool = False
    ) -> tuple[AttentionBackend, KVCacheSpec]:
        """A backend for the KV cache that this run wants, with as little more as its pages need for the longest row.

        One that serves whole batches only gets no limit.
        """
        spec = dataclasses.replace(self.setting.target.kv_cache_spec(self.batch_size), trees=trees)
        for more in (1, 2, 4, 8, None):
            limit = None if more is None or self.max_tokens is None else more * self.max_tokens
            backend, asked = make_backend(), dataclasses.replace(spec, continuous=True, max_tokens=limit)
            if backend.unsupported(asked):
                asked = spec
            backend.allocate(asked)
            if asked is spec or limit is None or backend.fits({"the longest": self.longest}):
                break
        return backend, asked

    @property
    def longest(self) -> int:
        """Tokens of the longest row at its end."""
        return max(len(request.prompt_ids) + request.max_new_tokens for request in self.requests)

    def scheduler(self, *, continuous: bool) -> Scheduler:
        """Rows that come and go, or whole batches."""
        if continuous:
            return ContinuousScheduler(self.batch_size, self.max_step_tokens, headroom=0)
        return StaticScheduler(self.batch_size)


@st.composite
def runs(draw: st.DrawFn, models: Seq[str]) -> Run:
    """Any run: models, prompts, limits, EOS that comes up, batches of few rows, pieces of prompts, little memory."""
    where = setting(draw(st.sampled_from(models)), draw(st.sampled_from(_VOCAB_SIZES)))
    prompts = draw(st.lists(st.sampled_from(texts(where.vocab_size)), min_size=1, max_size=5))
    limit = st.just(NEW_TOKENS) | st.integers(1, NEW_TOKENS)
    requests = []
    for number, prompt in enumerate(prompts):
        tokens = where.references[prompt]
        eos = draw(st.just(frozenset()) | st.sampled_from(tokens).map(lambda token: frozenset([token])))
        requests.append(Request(f"r{number}", prompt, draw(limit), eos))
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    return Run(
        where,
        tuple(requests),
        draw(st.integers(1, BATCH_SIZE)),
        draw(st.sampled_from([512, 8, 3])),
        draw(st.sampled_from([None, longest, 2 * longest])),
        draw(policies()),
    )


def decode(
    run: Run, make_backend: Callable[[], AttentionBackend], drafter: Drafter | Seq[Drafter], rule: str
) -> Engine:
    """Decode the requests and hold every token to the reference; returns the engine, whose report counts them. Raises
    BrokenRule: `rule`, where a token differs; or any other that came to light on the way.
    """
    with named(f"{rule.partition('.')[0]}.raises", "a run of the engine"):
        backend, spec = run.allocate(make_backend, trees=any(each.drafts_trees for each in drafters_of(drafter)))
        engine = Engine(
            CausalLMRunner(run.setting.target, backend),
            drafter,
            scheduler=run.scheduler(continuous=spec.continuous),
            budget=run.policy,
            on_drafter_error="fail",
        )
        done = {generation.request_id: generation for generation in engine.run(run.requests)}
    for request in run.requests:
        expected, got = run.setting.references.of(request), done[request.request_id].token_ids
        if got != expected:
            first = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if len(set(pair)) > 1), -1)
            where = f"from token {first} on" if first >= 0 else "in their number"
            broken(
                rule,
                f"on {run.setting.name} request {request.request_id!r} got {got} in the place of "
                f"{expected}: they differ {where}",
            )
    return engine
