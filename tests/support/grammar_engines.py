"""Engines with every drafter for random grammars, and what became of the texts that they decoded."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from emssd_anpd import ANPDConfig
from emssd_cascade import CascadeConfig
from emssd_dflash import DFlashConfig
from emssd_draft_model import DraftModelConfig
from emssd_draft_model import TreeKind as ModelTree
from emssd_eagle import EagleConfig
from emssd_eagle3 import Eagle3Config
from emssd_early_exit import EarlyExitConfig
from emssd_early_exit import TreeKind as ExitTree
from emssd_hydra import HydraConfig
from emssd_kangaroo import KangarooConfig
from emssd_llma import LLMAConfig, Search
from emssd_lookahead import LookaheadConfig
from emssd_medusa import MedusaConfig
from emssd_mtp import MtpConfig
from emssd_ngrammys import NGrammysConfig
from emssd_none import NoneConfig
from emssd_padded import PaddedConfig
from emssd_pard import PardConfig
from emssd_pld import PLDConfig
from emssd_ragged import Kernels, RaggedConfig
from emssd_replay import ReplayConfig
from emssd_rest import RestConfig
from emssd_self_draft import SelfConfig
from emssd_self_draft import TreeKind as SelfTree
from emssd_suffix import SuffixConfig
from emssd_token_recycling import TokenRecyclingConfig
from emssd_union import UnionConfig

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.decoding.scheduler import ContinuousScheduler
from emssd.drafters.heads.options import TreeKind
from emssd.drafting.budget import FixedBudget
from emssd.model import BorrowedTarget, TargetModel
from emssd.plugins.registry import Registry
from emssd.sampling import SamplingParams
from emssd.sequences import FinishReason, Generation, Request
from emssd.testing.drafters import RandomDrafter, ScriptedBudget, TreeDrafter
from emssd.testing.models import tiny_model
from tests.support.grammars import EOS, is_valid, random_grammar, tokenizer
from tests.support.random_drafters import (
    random_adapter,
    random_block_head,
    random_eagle,
    random_hydra,
    random_layer,
    random_medusa,
    random_store,
)

__all__ = [
    "DRAFTERS",
    "VOCAB",
    "Tally",
    "check",
    "decode",
    "drafter_of",
    "make_engine",
    "plainly",
    "requests",
    "target",
]

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
_BACKENDS: dict[str, Any] = {
    "fused": RaggedConfig(kernels=Kernels.fused),
    "page 1": RaggedConfig(page_size=1, kernels=Kernels.torch),
    "page 3": RaggedConfig(page_size=3, kernels=Kernels.torch),
    "padded": PaddedConfig(),
    "unpad_both": PaddedConfig(pad_kv=False, pad_inputs=False),
}
_COPY: dict[str, Any] = {"match_length": 1, "copy_length": 3, "search": Search.prompt_and_output}
_SHAPE: dict[str, Any] = {"num_nodes": 9, "depth": 4, "top_k": 3}
_WAYS: dict[str, Any] = {"tree": ModelTree.rsd_c, "expansion": [2, 2, 1]}


def _replay(texts: Texts, **options: Any) -> ReplayConfig:
    path = Path(mkdtemp(prefix="emssd-known-")) / "known.jsonl"
    path.write_text("".join(json.dumps({"id": name, "token_ids": text}) + "\n" for name, text in texts.items()))
    return ReplayConfig(known=str(path), **options)


def _of_file(config: Callable[..., Any], write: Callable[..., str], *arguments: str, **options: Any) -> Any:
    return lambda texts, seed: config(path=_path(write, *arguments), **options)


@cache
def _path(write: Callable[..., str], *arguments: str) -> str:
    return write(SimpleNamespace(target=BorrowedTarget(target()), vocab_size=VOCAB), *arguments)


def _pard(_: Any) -> str:
    folder = Path(mkdtemp(prefix="emssd-pard-"))
    (folder / "config.json").write_text('{"pard_token": 2}')
    return str(folder)


@cache
def _store() -> str:
    return random_store(VOCAB)


DRAFTERS: dict[str, Any] = {
    "right and wrong trees": lambda texts, seed: TreeDrafter(VOCAB, 9, texts, right=0.8, seed=seed),
    "random trees": lambda texts, seed: TreeDrafter(VOCAB, 6, seed=seed),
    "random chains": lambda texts, seed: RandomDrafter(VOCAB, 5, texts, seed=seed),
    "none": NoneConfig(),
    "anpd": ANPDConfig(num_speculative_tokens=4),
    "cascade": CascadeConfig(["llma", "draft_model"], {"llma": _COPY, "draft_model": {"path": "near"}}),
    "dflash": _of_file(DFlashConfig, random_block_head),
    "draft_model": DraftModelConfig("near", 4),
    "draft_model, static": DraftModelConfig("near", tree=ModelTree.static, expansion=[2, 3, 1]),
    "draft_model, dynamic": DraftModelConfig("near", tree=ModelTree.dynamic, **_SHAPE),
    "draft_model, sequoia": DraftModelConfig("near", tree=ModelTree.sequoia, **_SHAPE),
    "draft_model, rsd_c": DraftModelConfig("near", **_WAYS),
    "draft_model, rsd_s": DraftModelConfig("near", tree=ModelTree.rsd_s, width=3, depth=3),
    "eagle": _of_file(EagleConfig, random_eagle, "eagle", **_SHAPE),
    "eagle, static": _of_file(EagleConfig, random_eagle, "eagle", tree=TreeKind.static),
    "eagle3": _of_file(Eagle3Config, random_eagle, "eagle3", **_SHAPE),
    "eagle3, chain": _of_file(Eagle3Config, random_eagle, "eagle3", tree=TreeKind.chain, depth=4),
    "early_exit": EarlyExitConfig(num_layers=1, tree=ExitTree.chain, depth=3),
    "early_exit, dynamic": EarlyExitConfig(num_layers=1, **_SHAPE),
    "hydra": _of_file(HydraConfig, random_hydra, num_nodes=9, top_k=3),
    "kangaroo": _of_file(KangarooConfig, random_adapter, num_layers=1, min_confidence=0.0),
    "llma": LLMAConfig(**_COPY),
    "llma, tree": LLMAConfig(**_COPY, branches=3),
    "lookahead": LookaheadConfig(window=3, ngram=3, guesses=3),
    "medusa": _of_file(MedusaConfig, random_medusa, num_nodes=9),
    "medusa, static": _of_file(MedusaConfig, random_medusa, tree=TreeKind.static),
    "mtp": _of_file(MtpConfig, random_layer),
    "mtp, dynamic": _of_file(MtpConfig, random_layer, tree=TreeKind.dynamic, **_SHAPE),
    "ngrammys": NGrammysConfig(num_candidates=3, num_nodes=9, depth=4),
    "pard": _of_file(PardConfig, _pard),
    "pld": PLDConfig(num_speculative_tokens=4, require_full_copy=False),
    "replay": lambda texts, seed: _replay(texts, p=0.7),
    "replay, tree": lambda texts, seed: _replay(texts, branches=[2, 1], chances=[[0.4, 0.3]]),
    "rest": lambda texts, seed: RestConfig(_store(), min_match=1),
    "rest, tree": lambda texts, seed: RestConfig(_store(), min_match=1, branches=6, num_nodes=9),
    "self": SelfConfig(depth=3),
    "self, dynamic": SelfConfig(tree=SelfTree.dynamic, **_SHAPE),
    "suffix": SuffixConfig(),
    "suffix, tree": SuffixConfig(branches=3, min_token_prob=0.01, cache_tokens=200),
    "token_recycling": TokenRecyclingConfig(num_candidates=3, num_nodes=9, depth=4),
    "union": UnionConfig(
        ["llma", "draft_model", "token_recycling"],
        {"llma": _COPY, "draft_model": {"path": "near", "num_speculative_tokens": 3}},
    ),
}


def drafter_of(name: str, texts: Texts, seed: int) -> Any:
    """One of `DRAFTERS`, for rows whose outputs will be `texts`."""
    made = DRAFTERS[name]
    return made(texts, seed) if callable(made) else made


@cache
def target() -> TargetModel:
    return TargetModel(tiny_model("llama", vocab_size=VOCAB, max_model_len=96, std=0.15), frozen=True)


@cache
def _near() -> TargetModel:
    model: Any = tiny_model("llama", vocab_size=VOCAB, max_model_len=96, std=0.15)
    with torch.no_grad():
        model.lm_head.weight.add_(tiny_model("llama", seed=1, vocab_size=VOCAB, std=0.05).lm_head.weight)
    return TargetModel(model)


@cache
def _registry() -> Registry:
    return Registry()


def make_engine(
    drafter: Any = "none",
    backend: Any = "page 3",
    batch_size: int = 3,
    *,
    max_tokens: int | None = None,
    budget: Any = None,
    **options: Any,
) -> Engine:
    """An engine as users get it; with `max_tokens` of KV, rows begin as soon as there is room for their prompts."""
    chosen = EngineOptions(batch_size, on_drafter_error=OnDrafterError.fail, max_step_tokens=64, **options)
    spec = target().kv_cache_spec(1)

    def assembled(room: int) -> Engine:
        chosen.kv_memory = str(room * spec.bytes_per_token()) if room else None
        return Engine.assemble(
            target(),
            tokenizer(),
            drafter=drafter,
            backend=_BACKENDS.get(backend, backend),
            budget=budget or FixedBudget(),
            options=chosen,
            registry=_registry(),
            eos=[EOS],
            load=lambda path, **_: (_near(), None),
        )

    made, room = assembled(max_tokens or 0), max_tokens or 0
    while max_tokens and not made.runner.fits({"longest": max_tokens}):
        made, room = assembled(room + 9), room + 9  # what drafters hold of their own takes its share
    if max_tokens and isinstance(made.scheduler, ContinuousScheduler):
        made.scheduler = ContinuousScheduler(batch_size, 64, headroom=0)
    return made


def requests(grammars: Seq[Any], limit: int = _LIMIT, *, each: Seq[dict[str, Any]] = ({},), **common: Any) -> list[Any]:
    """A request for each grammar, with the options of `SamplingParams` that all have, and those `each` has in turn."""
    options = [common | each[row % len(each)] for row in range(len(grammars))]
    return [
        Request(str(row), (40 + row % 50, 50, 60), limit, frozenset([EOS]), sampling=SamplingParams(grammar=own, **how))
        for row, (own, how) in enumerate(zip(grammars, options, strict=True))
    ]


def decode(engine: Engine, asked: Seq[Request]) -> dict[str, Generation]:
    return {done.request_id: done for done in engine.run(asked)}


@cache
def _plain() -> Engine:
    return make_engine(batch_size=1, force_tokens=False)


def plainly(asked: Seq[Request]) -> dict[str, Generation]:
    """One row at a time, without any draft."""
    found = decode(_plain(), asked)
    assert _plain().report.num_drafted == 0
    return found


@dataclass
class Tally:
    """What became of texts, by drafter and together."""

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
    draw, name = random.Random(seed), [*DRAFTERS][seed % len(DRAFTERS)]
    grammars = [random_grammar(seed * 1000 + row) for row in range(num_rows)]
    turned = [*_SAMPLINGS[seed % len(_SAMPLINGS) :], *_SAMPLINGS]
    asked = requests(grammars, seed=seed, each=turned[: draw.choice([1, 5])])
    expected = plainly(asked)
    texts = {row: done.token_ids for row, done in expected.items()}
    policies = [FixedBudget, FixedBudget, partial(ScriptedBudget, [(9, 9), (3, 2), (0, 0), (9, 1)])]
    backend, crowded = draw.choice([("page 1", True), ("page 3", True)] * 2 + [(each, False) for each in _BACKENDS])
    engine = make_engine(
        drafter_of(name, texts, seed),
        backend,
        draw.choice([3, 4] if crowded else [1, 2, 3, 4]),
        max_tokens=_LIMIT + 3 if crowded else None,
        budget=draw.choice(policies)(),
    )
    found = decode(engine, asked)
    for row, grammar in enumerate(grammars):
        done, plain = found[str(row)], expected[str(row)]
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
