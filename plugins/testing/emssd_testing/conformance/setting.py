"""The surroundings of a plugin in the suites: float64 targets, their texts, and runs that Hypothesis draws."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.decoding.engine import Engine
from emssd.decoding.scheduler import ContinuousScheduler, StaticScheduler
from emssd.drafting import BudgetPolicy, Drafter, DrafterContext
from emssd.errors import ConfigError
from emssd.hooks.registry import Registry
from emssd.model import BorrowedTarget, CausalLMRunner, ModelOptions, ModelRunner, TargetModel, load_model
from emssd.sequences import Request
from emssd_testing.conformance.rules import broken, named
from emssd_testing.models import ARCHITECTURES, tiny_model
from emssd_testing.oracle import DenseBackend, References
from emssd_testing.strategies import policies

__all__ = ["BATCH_SIZE", "MODEL_LEN", "Setting", "decode", "drafters_of", "runs", "setting"]

BATCH_SIZE = 4
_NEW_TOKENS = 16
MODEL_LEN = 64
_VOCAB_SIZES = (5, 11, 61)  # in a small vocabulary a guess is right by chance
_NOISE = 0.02  # of a draft model's weights: right most of the time, and not always
_STD = 0.12  # of a target's weights: its text repeats itself before long, so that retrieval has something to find


@dataclass(frozen=True, slots=True)
class Setting:
    """A target, its texts, and the context of a drafter for it.

    Attributes:
        references: the target's greedy texts, by prompt.
    """

    name: str
    target: TargetModel
    references: References
    context: DrafterContext


@cache
def setting(architecture: str, vocab_size: int) -> Setting:
    """A random target of a few tokens' vocabulary, in float64, made once; or one that is loaded.

    Its context gives drafters a tokenizer of one word per token. ``load_runner`` gives, whatever the path, a copy of
    the target with noise in its weights, on the dense reference: it is right often and not always. ``make_drafter``
    gives the installed drafters, ``target`` lends the target's embeddings and LM head, and ``make_cache``
    gives the dense reference.

    Args:
        architecture: a key of `ARCHITECTURES`, or the folder of a model, which is loaded in float64 on the CPU.
    """
    name, tokenizer = f"a tiny model ({architecture}, {vocab_size} tokens)", _tokenizer(vocab_size)
    if architecture in ARCHITECTURES:
        target = TargetModel(tiny_model(architecture, vocab_size=vocab_size, max_model_len=MODEL_LEN, std=_STD))
    elif Path(architecture).is_dir():
        name, (target, tokenizer) = architecture, _loaded(architecture)
        vocab_size = target.vocab_size
    else:
        choices = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{architecture!r} is no folder of a model, nor a tiny model's architecture: {choices}")

    @cache
    def noisy() -> TargetModel:
        model = copy.deepcopy(target.model)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += _NOISE * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        return TargetModel(model)

    def make_cache(spec: KVCacheSpec) -> AttentionBackend:
        cache = DenseBackend()
        cache.allocate(spec)
        return cache

    def load_runner(path: str, *, trees: bool = False, accept: Any = None) -> tuple[ModelRunner, Any]:
        return CausalLMRunner(noisy(), make_cache(noisy().kv_cache_spec(BATCH_SIZE))), tokenizer

    def make_drafter(name: str, values: Mapping[str, Any]) -> Drafter:
        plugin = _registry().find("drafter", name)
        drafter: Drafter = plugin.build(plugin.config(**values), context)
        return drafter

    context = DrafterContext(
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        load_runner=load_runner,
        make_drafter=make_drafter,
        on_drafter_error="fail",
        target=BorrowedTarget(target),
        cache_spec=target.kv_cache_spec(BATCH_SIZE),
        make_cache=make_cache,
    )
    return Setting(name, target, References(target, _NEW_TOKENS), context)


def _texts(vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts, few enough for their references to be remembered: of one token and of many, repetitive and random."""
    generator = torch.Generator().manual_seed(0)
    prompts = list[tuple[int, ...]]()
    for length in (1, 2, 3, 7, 20, 31):
        random = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        pattern = torch.randint(0, vocab_size, (3,), generator=generator).tolist()
        prompts += [tuple(random), tuple((pattern * length)[:length]), (vocab_size - 1,) * length]
    return prompts


def drafters_of(made: Drafter | Seq[Drafter]) -> list[Drafter]:
    """The object that a plugin built, as a list of drafters that are asked in turn."""
    return [made] if isinstance(made, Drafter) else list(made)


@dataclass(frozen=True, slots=True)
class Run:
    """Requests, and how an engine is to run them.

    Attributes:
        max_tokens: limit of the KV cache, so that rows are preempted; ``None`` for no limit.
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
        longest = max(len(request.prompt_ids) + request.max_new_tokens for request in self.requests)
        for more in (1, 2, 4, 8, None):
            limit = None if more is None or self.max_tokens is None else more * self.max_tokens
            backend, limited = make_backend(), dataclasses.replace(spec, continuous=True, max_tokens=limit)
            if backend.unsupported(limited):
                limited = spec
            backend.allocate(limited)
            if limited is spec or limit is None or backend.fits({"the longest": longest}):
                break
        return backend, limited


@st.composite
def runs(draw: st.DrawFn, models: Seq[str]) -> Run:
    """Any run: models, prompts, limits, EOS that comes up, batches of few rows, pieces of prompts, little memory."""
    where = setting(draw(st.sampled_from(models)), draw(st.sampled_from(_VOCAB_SIZES)))
    prompts = draw(st.lists(st.sampled_from(_texts(where.target.vocab_size)), min_size=1, max_size=5))
    limit = st.just(_NEW_TOKENS) | st.integers(1, _NEW_TOKENS)
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
        backend, spec = run.allocate(make_backend, trees=any(one.drafts_trees for one in drafters_of(drafter)))
        engine = Engine(
            CausalLMRunner(run.setting.target, backend),
            drafter,
            scheduler=ContinuousScheduler(run.batch_size, run.max_step_tokens, headroom=0)
            if spec.continuous
            else StaticScheduler(run.batch_size),
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


@cache
def _loaded(path: str) -> tuple[TargetModel, Any]:
    return load_model(ModelOptions(path, dtype="float64", device="cpu", max_model_len=MODEL_LEN, compile=False))


@cache
def _registry() -> Registry:
    return Registry()


def _tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{token}": token for token in range(vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast  # it has no annotations
    return make(tokenizer_object=words, unk_token="w0")
