"""Every drafter that comes along, in all of its shapes, with random weights for any small target: `EveryDrafter`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from emssd_anpd import ANPDConfig
from emssd_auto import AutoConfig
from emssd_cascade import CascadeConfig
from emssd_draft_model import DraftModelConfig
from emssd_draft_model import TreeKind as ModelTree
from emssd_early_exit import EarlyExitConfig
from emssd_heads.dflash import DFlashConfig
from emssd_heads.eagle import EagleConfig
from emssd_heads.eagle3 import Eagle3Config
from emssd_heads.hydra import HydraConfig
from emssd_heads.kangaroo import KangarooConfig
from emssd_heads.medusa import MedusaConfig
from emssd_heads.mtp import MtpConfig
from emssd_heads.options import TreeKind
from emssd_heads.pard import PardConfig
from emssd_lab.replay import ReplayConfig
from emssd_llma import LLMAConfig, Search
from emssd_lookahead import LookaheadConfig
from emssd_ngrammys import NGrammysConfig
from emssd_none import NoneConfig
from emssd_pld import PLDConfig
from emssd_rest import RestConfig
from emssd_self_draft import SelfConfig
from emssd_suffix import SuffixConfig
from emssd_testing.models import tiny_model
from emssd_token_recycling import TokenRecyclingConfig
from emssd_union import UnionConfig

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.decoding.scheduler import ContinuousScheduler
from emssd.draft_models.shapes import LayerTreeKind
from emssd.drafting import BudgetPolicy
from emssd.drafting.budget import FixedBudget
from emssd.hooks.registry import Registry
from emssd.model import BorrowedTarget, ModelOptions, TargetModel
from tests.support import random_drafters as written
from tests.support.backends import CONFIGS
from tests.support.heads import new_folder, write_head

Texts = Mapping[str, tuple[int, ...]]
_COPY: dict[str, Any] = {"match_length": 1, "copy_length": 3, "search": Search.prompt_and_output}
_SHAPE: dict[str, Any] = {"num_nodes": 9, "depth": 4, "top_k": 3}


def _of_file(config: Callable[..., Any], write: Callable[..., str], *arguments: str, **options: Any) -> Any:
    return lambda every, texts: config(path=every.path(write, *arguments), **options)


def _replay(**options: Any) -> Any:
    def made(every: EveryDrafter, texts: Texts) -> ReplayConfig:
        path = every.folder / "known.jsonl"
        path.write_text("".join(json.dumps({"id": name, "token_ids": text}) + "\n" for name, text in texts.items()))
        return ReplayConfig(known=str(path), **options)

    return made


def _rest(**options: Any) -> Any:
    return lambda every, texts: RestConfig(written.random_store(every.target.vocab_size), min_match=1, **options)


DRAFTERS: dict[str, Any] = {
    "none": NoneConfig(),
    "anpd": ANPDConfig(num_speculative_tokens=4),
    "auto": AutoConfig(),
    "cascade": CascadeConfig(["llma", "draft_model"], {"llma": _COPY, "draft_model": {"path": "near"}}),
    "dflash": _of_file(DFlashConfig, written.random_block_head),
    "draft_model": DraftModelConfig("near", 4),
    "draft_model, static": DraftModelConfig("near", tree=ModelTree.static, expansion=[2, 3, 1]),
    "draft_model, dynamic": DraftModelConfig("near", tree=ModelTree.dynamic, **_SHAPE),
    "draft_model, sequoia": DraftModelConfig("near", tree=ModelTree.sequoia, **_SHAPE),
    "eagle": _of_file(EagleConfig, written.random_eagle, "eagle", **_SHAPE),
    "eagle, static": _of_file(EagleConfig, written.random_eagle, "eagle", tree=TreeKind.static),
    "eagle3": _of_file(Eagle3Config, written.random_eagle, "eagle3", **_SHAPE),
    "eagle3, chain": _of_file(Eagle3Config, written.random_eagle, "eagle3", tree=TreeKind.chain, depth=4),
    "early_exit": EarlyExitConfig(num_layers=1, tree=LayerTreeKind.chain, depth=3),
    "early_exit, dynamic": EarlyExitConfig(num_layers=1, **_SHAPE),
    "hydra": _of_file(HydraConfig, written.random_hydra, num_nodes=9, top_k=3),
    "kangaroo": _of_file(KangarooConfig, written.random_adapter, num_layers=1, min_confidence=0.0),
    "llma": LLMAConfig(**_COPY),
    "llma, tree": LLMAConfig(**_COPY, branches=3),
    "lookahead": LookaheadConfig(window=3, ngram=3, guesses=3),
    "medusa": _of_file(MedusaConfig, written.random_medusa, num_nodes=9),
    "medusa, static": _of_file(MedusaConfig, written.random_medusa, tree=TreeKind.static),
    "mtp": _of_file(MtpConfig, written.random_layer),
    "mtp, dynamic": _of_file(MtpConfig, written.random_layer, tree=TreeKind.dynamic, **_SHAPE),
    "ngrammys": NGrammysConfig(num_candidates=3, num_nodes=9, depth=4),
    "pard": _of_file(PardConfig, lambda _: write_head(new_folder(), {"pard_token": 2}, {})),
    "pld": PLDConfig(num_speculative_tokens=4, require_full_copy=False),
    "replay": _replay(p=0.7),
    "replay, tree": _replay(branches=[2, 1], chances=[[0.4, 0.3]]),
    "rest": _rest(),
    "rest, tree": _rest(branches=6, num_nodes=9),
    "self": SelfConfig(depth=3),
    "self, dynamic": SelfConfig(tree=LayerTreeKind.dynamic, **_SHAPE),
    "suffix": SuffixConfig(),
    "suffix, tree": SuffixConfig(branches=3, min_token_prob=0.01, cache_tokens=200),
    "token_recycling": TokenRecyclingConfig(num_candidates=3, num_nodes=9, depth=4),
    "union": UnionConfig(
        ["llma", "draft_model", "token_recycling"],
        {"llma": _COPY, "draft_model": {"path": "near", "num_speculative_tokens": 3}},
    ),
}
COINS: dict[str, Any] = {  # of residual sampling
    "draft_model, rsd_c": DraftModelConfig("near", tree=ModelTree.rsd_c, expansion=[2, 2, 1]),
    "draft_model, rsd_s": DraftModelConfig("near", tree=ModelTree.rsd_s, width=3, depth=3),
}


class EveryDrafter:
    """Configs of `DRAFTERS` for one target, and their files.

    Args:
        target: a Llama.
    """

    def __init__(self, target: TargetModel) -> None:
        self.target, self.folder = target, new_folder()
        self.registry = Registry()

    def engine(
        self,
        drafter: Any,
        backend: Any,
        options: EngineOptions,
        tokenizer: Any = None,
        *,
        budget: BudgetPolicy | None = None,
        max_tokens: int = 0,
        eos: Iterable[int] | None = None,
    ) -> Engine:
        """An engine as users get it. It raises what drafters raise.

        With `max_tokens` it has hardly more memory than a row of so many tokens takes, and rows begin as soon as there
        is room for their prompts, so that some are preempted.
        """
        options.on_drafter_error = OnDrafterError.fail
        room, token = max_tokens, self.target.kv_cache_spec(1).bytes_per_token()
        while True:
            options.kv_memory = str(room * token) if room else None
            made = Engine.assemble(
                self.target, tokenizer, drafter=drafter, backend=CONFIGS.get(backend, backend),
                budget=budget or FixedBudget(), options=options, registry=self.registry, eos=eos, load=self.load,
            )  # fmt: skip
            if made.runner.fits({"longest": max_tokens}):
                break
            room += 9  # what drafters hold of their own takes its share
        if room and isinstance(made.scheduler, ContinuousScheduler):
            made.scheduler = ContinuousScheduler(options.batch_size, options.max_step_tokens, headroom=0)
        return made

    def config(self, name: str, texts: Texts) -> Any:
        """One of `DRAFTERS` or `COINS`, for rows whose outputs will be `texts`."""
        made = (DRAFTERS | COINS)[name]
        return made(self, texts) if callable(made) else made

    def path(self, write: Callable[..., str], *arguments: str) -> str:
        """The files that `write` has written for the target."""
        return write(BorrowedTarget(self.target), *arguments)

    @cached_property
    def near(self) -> TargetModel:
        """A draft model that is right at times."""
        sizes = {"vocab_size": self.target.vocab_size, "max_model_len": self.target.max_model_len}
        model: Any = tiny_model("llama", std=0.15, **sizes)
        with torch.no_grad():
            model.lm_head.weight.add_(tiny_model("llama", seed=1, std=0.05, **sizes).lm_head.weight)
        return TargetModel(model)

    def load(self, options: ModelOptions, **_: Any) -> tuple[TargetModel, None]:
        """A function that loads a drafter's model."""
        return self.near, None
