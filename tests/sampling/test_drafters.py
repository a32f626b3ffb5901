"""In float64, sampled tokens are those of plain sampling with every drafter that is offered, on every CPU backend.

Oracle: sampling written out by hand, one row at a time, by the model's own eager attention without a cache. Plain
decoding, ``drafter=none`` at batch size 1, is held to it like any other run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from emssd_anpd import ANPDConfig
from emssd_cascade import CascadeConfig
from emssd_draft_model import DraftModelConfig, TreeKind
from emssd_early_exit import EarlyExitConfig
from emssd_early_exit import TreeKind as ExitTree
from emssd_llma import LLMAConfig, Search
from emssd_lookahead import LookaheadConfig
from emssd_ngrammys import NGrammysConfig
from emssd_none import NoneConfig
from emssd_padded import PaddedConfig
from emssd_pld import PLDConfig
from emssd_ragged import Kernels, RaggedConfig
from emssd_ragged.backend import ragged_backend
from emssd_replay import ReplayConfig
from emssd_rest import RestConfig
from emssd_rest.build import build_store
from emssd_self_draft import SelfConfig
from emssd_self_draft import TreeKind as SelfTree
from emssd_suffix import SuffixConfig
from emssd_token_recycling import TokenRecyclingConfig
from emssd_union import UnionConfig
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from emssd.decoding.engine import Engine
from emssd.decoding.options import Batching, EngineOptions, OnDrafterError
from emssd.decoding.scheduler import ContinuousScheduler
from emssd.drafting import BudgetPolicy, Draft
from emssd.drafting.budget import FixedBudget
from emssd.model import CausalLMRunner, TargetModel
from emssd.plugins.registry import PluginWarning, Registry
from emssd.sampling import SamplingParams
from emssd.sequences import Request, Row
from emssd.testing.drafters import PerfectDrafter
from emssd.testing.models import tiny_model
from emssd.testing.strategies import policies
from tests.sampling.test_engine import NUM_NEW, VOCAB, Expected, decode, requests, target
from tests.support.tiers import only

BACKENDS: dict[str, Any] = {
    "fused": RaggedConfig(kernels=Kernels.fused),
    "torch": RaggedConfig(kernels=Kernels.torch),
    "page 1": RaggedConfig(page_size=1, kernels=Kernels.torch),
    "page 3": RaggedConfig(page_size=3, kernels=Kernels.torch),
    "padded": PaddedConfig(),
    "unpad_kv": PaddedConfig(pad_kv=False),
    "unpad_inputs": PaddedConfig(pad_inputs=False),
    "unpad_both": PaddedConfig(pad_kv=False, pad_inputs=False),
}
PAGED = tuple(name for name, config in BACKENDS.items() if isinstance(config, RaggedConfig))
_COPY: dict[str, Any] = {"match_length": 1, "copy_length": 3, "search": Search.prompt_and_output}
_SHAPE: dict[str, Any] = {"num_nodes": 9, "depth": 4, "top_k": 3}
DRAFTERS: dict[str, Any] = {
    "none": NoneConfig(),
    "llma": LLMAConfig(**_COPY),
    "llma, tree": LLMAConfig(**_COPY, branches=3),
    "pld": PLDConfig(num_speculative_tokens=4, require_full_copy=False),
    "suffix": SuffixConfig(),
    "suffix, tree": SuffixConfig(branches=3, min_token_prob=0.01, cache_tokens=200),
    "rest": RestConfig("store", min_match=1),
    "rest, tree": RestConfig("store", min_match=1, branches=6, num_nodes=9),
    "draft_model, chain": DraftModelConfig("near", 3),
    "draft_model, static": DraftModelConfig("near", tree=TreeKind.static, expansion=[2, 2, 1]),
    "draft_model, dynamic": DraftModelConfig("near", tree=TreeKind.dynamic, **_SHAPE),
    "draft_model, sequoia": DraftModelConfig("near", tree=TreeKind.sequoia, **_SHAPE),
    "lookahead": LookaheadConfig(window=3, ngram=3, guesses=3),
    "token_recycling": TokenRecyclingConfig(num_candidates=3, num_nodes=9, depth=4),
    "anpd": ANPDConfig(num_speculative_tokens=4),
    "ngrammys": NGrammysConfig(num_candidates=3, num_nodes=9, depth=4),
    "self, chain": SelfConfig(depth=3),
    "self, dynamic": SelfConfig(tree=SelfTree.dynamic, **_SHAPE),
    "early_exit, chain": EarlyExitConfig(num_layers=1, tree=ExitTree.chain, depth=3),
    "early_exit, dynamic": EarlyExitConfig(num_layers=1, **_SHAPE),
    "cascade": CascadeConfig(["llma", "draft_model"], {"llma": _COPY, "draft_model": {"path": "near"}}),
    "union": UnionConfig(
        ["llma", "draft_model", "token_recycling"],
        {"llma": _COPY, "draft_model": {"path": "near", "num_speculative_tokens": 3}},
    ),
    "replay": ReplayConfig(known="known", p=0.7),
    "replay, tree": ReplayConfig(known="known", branches=[2, 1], chances=[[0.4, 0.3]]),
}
TRAINED = {
    "dflash",
    "eagle",
    "eagle3",
    "hydra",
    "kangaroo",
    "medusa",
    "mtp",
    "pard",
}  # their own tests draw random weights
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # to explain a failure takes minutes


@cache
def near() -> TargetModel:
    """A draft model that is right at times."""
    model: Any = tiny_model("llama", vocab_size=VOCAB, max_model_len=64, std=0.15)
    other: Any = tiny_model("llama", seed=1, vocab_size=VOCAB, std=0.05)
    with torch.no_grad():
        model.lm_head.weight.add_(other.lm_head.weight)
    return TargetModel(model)


def load_near(path: str, **_: Any) -> tuple[TargetModel, None]:
    assert path == "near"
    return near(), None


@cache
def registry() -> Registry:
    return Registry()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a datastore of random text, in which every short n-gram stands."""
    where, random = tmp_path_factory.mktemp("drafters"), Random(0)
    build_store(where / "store", [[random.randrange(VOCAB) for _ in range(1500)]])
    return where


def config_of(drafter: str, folder: Path, expected: Expected) -> Any:
    """The config of a drafter, with its files in `folder`."""
    config = DRAFTERS[drafter]
    if isinstance(config, RestConfig):
        return dataclasses.replace(config, store=str(folder / "store"))
    if isinstance(config, ReplayConfig):
        path = folder / "known.jsonl"
        path.write_text("".join(json.dumps({"id": name, "token_ids": text}) + "\n" for name, text in expected.items()))
        return dataclasses.replace(config, known=str(path))
    return config


def make_engine(
    drafter: Any,
    backend: str,
    *,
    batch_size: int = 3,
    batching: Batching = Batching.auto,
    max_step_tokens: int = 64,
    budget: BudgetPolicy | None = None,
    longest: int = 0,
) -> Engine:
    """An engine as users get it; with `longest` in hardly more memory than a row of so many tokens takes.

    Then a row begins as soon as there is room for its prompt, so that some are preempted.
    """
    room, token = longest, target().kv_cache_spec(1).bytes_per_token()
    while True:
        options = EngineOptions(
            batch_size,
            batching,
            max_step_tokens,
            kv_memory=str(room * token) if room else None,
            on_drafter_error=OnDrafterError.fail,
        )
        made = Engine.assemble(
            target(), None, drafter=drafter, backend=BACKENDS[backend], budget=budget or FixedBudget(), options=options,
            registry=registry(), load=load_near,
        )  # fmt: skip
        if made.runner.fits({"longest": longest}):
            break
        room += 16
    if not room or not isinstance(made.scheduler, ContinuousScheduler):
        return made
    return Engine(
        made.runner,
        [each.drafter for each in made.drafting.drafters],
        scheduler=ContinuousScheduler(batch_size, max_step_tokens, headroom=0),
        budget=made.drafting.policy,
        on_drafter_error="fail",
    )


def right(asked: Seq[Request], expected: Expected) -> dict[str, tuple[int, ...]]:
    return {request.request_id: expected.of(request) for request in asked}


def longest_of(asked: Seq[Request]) -> int:
    return max(len(request.prompt_ids) + request.max_new_tokens for request in asked)


def test_every_drafter_that_is_offered_is_among_them() -> None:
    named = {name.split(",")[0] for name in DRAFTERS}
    ours = [
        each.name for each in registry().specs("drafter") if registry().source("drafter", each.name)[:6] == "emssd "
    ]
    assert sorted(ours) == sorted(named | TRAINED)


MIXED = [
    SamplingParams(temperature=0.4, seed=1),
    None,
    SamplingParams(temperature=1.2, top_k=6, top_p=0.9, seed=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, min_p=0.05, typical_p=0.9, logit_bias={3: 1.5, 7: -3.0}, seed=3),
    SamplingParams(temperature=0.5, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, seed=4),
]


def mixed() -> list[Request]:
    """Greedy rows and sampled ones, each with params of its own; no text may be that of another."""
    prompts = [(1, 2, 3, 1, 2, 3, 1, 2), (4,), (5, 6, 7, 8, 9, 10) * 3, (1, 2, 3, 1, 2, 3, 1, 2)]
    return [Request(f"{n}", prompts[n % len(prompts)], 12, sampling=params) for n, params in enumerate(MIXED)]


@pytest.mark.parametrize("drafter", only(DRAFTERS, ci=DRAFTERS.keys() - {"replay, tree", "early_exit, chain"}))
def test_rows_with_params_of_their_own_are_right_on_every_backend(drafter: str, folder: Path) -> None:
    asked = mixed()
    expected = Expected(asked)
    config, accepted = config_of(drafter, folder, expected), 0
    for number, backend in enumerate(BACKENDS):
        engine = make_engine(config, backend, batch_size=(3, 6, 2)[number % 3])
        assert decode(engine, asked) == right(asked, expected), backend
        accepted += engine.report.num_accepted
    assert accepted > 0 or drafter == "none", "else nothing was shown"


@settings(phases=PHASES)
@given(
    asked=requests(),
    drafter=st.sampled_from([*DRAFTERS]),
    backend=st.sampled_from([*BACKENDS]),
    batch_size=st.sampled_from([3, 1, 2, 5]),
    batching=st.sampled_from([Batching.auto, Batching.auto, Batching.static]),
    max_step_tokens=st.sampled_from([64, 8, 3]),
    budget=policies(),
    in_little_memory=st.booleans(),
    data=st.data(),
)
def test_tokens_are_those_of_plain_sampling(
    folder: Path,
    asked: list[Request],
    drafter: str,
    backend: str,
    batch_size: int,
    batching: Batching,
    max_step_tokens: int,
    budget: BudgetPolicy,
    in_little_memory: bool,
    data: st.DataObject,
) -> None:
    expected = Expected(asked)
    engine = make_engine(
        config_of(drafter, folder, expected),
        backend,
        batch_size=batch_size,
        batching=batching,
        max_step_tokens=max_step_tokens,
        budget=budget,
        longest=longest_of(asked) if in_little_memory and backend in PAGED else 0,
    )
    assert decode(engine, asked) == right(asked, expected)
    again = data.draw(st.permutations(asked), label="another order")
    assert decode(engine, again) == right(asked, expected), "by drafters that have seen these rows before"


@pytest.mark.parametrize("drafter", ["suffix, tree", "draft_model, dynamic", "union", "lookahead"])
@pytest.mark.parametrize("backend", ["page 1", "fused"])
def test_preempted_rows_go_on_with_the_same_text(drafter: str, backend: str, folder: Path) -> None:
    asked = [dataclasses.replace(each, max_new_tokens=28) for each in mixed()]
    expected = Expected(asked)
    engine = make_engine(config_of(drafter, folder, expected), backend, batch_size=6, longest=longest_of(asked))
    assert decode(engine, asked) == right(asked, expected)
    assert engine.report.num_preempted > 0


class BeyondDrafter(PerfectDrafter):
    """Right tokens, and behind them an id that is no token's.

    Args:
        beyond: that id.
        vocab_size, num_speculative_tokens, references: see `PerfectDrafter`.
    """

    def __init__(self, beyond: int, *args: Any) -> None:
        super().__init__(*args)
        self.beyond = beyond

    def chain(self, row: Row, limit: int) -> list[int]:
        return [*super().chain(row, limit)[:2], self.beyond, 1]


@pytest.mark.parametrize("beyond", [VOCAB, -1, 2**40])
def test_ids_of_no_token_are_not_believed_where_penalties_read_them(
    beyond: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie on a device, so that nobody can have looked at them before the step."""
    params = SamplingParams(temperature=0.8, repetition_penalty=1.5, frequency_penalty=0.3, seed=5)
    asked = [Request(str(number), (1, 2, 3, 4), 12, sampling=params) for number in range(3)]
    expected = Expected(asked)
    texts = right(asked, expected)
    backend = ragged_backend(page_size=3)
    backend.allocate(target().kv_cache_spec(3))
    engine = Engine(CausalLMRunner(target(), backend), BeyondDrafter(beyond, VOCAB, 4, expected), batch_size=3)
    monkeypatch.setattr(Draft, "on_host", property(lambda self: False))
    with pytest.warns(PluginWarning, match="outside the target's vocabulary of 11"):
        assert decode(engine, asked) == texts
    assert engine.drafting.drafters[0].failure
    assert engine.report.num_accepted == 6, "of the only step in which it drafted"


def test_plain_sampling_is_what_is_written_out_by_hand() -> None:
    asked = mixed()
    texts = decode(make_engine("none", "torch", batch_size=1), asked)
    assert texts == right(asked, Expected(asked))
    assert len(set(texts.values())) == len(asked)
    assert max(map(len, texts.values())) == NUM_NEW
