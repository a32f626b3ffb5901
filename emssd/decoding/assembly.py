"""Makes the parts of an engine from names and configs: this module knows the registry, the engine does not."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from emssd.data.model_folder import source_of
from emssd.data.model_options import ModelOptions
from emssd.decoding.caches import Caches
from emssd.decoding.options import EngineOptions
from emssd.decoding.outcome import SharedTimer, StepTimer
from emssd.drafting import BudgetPolicy, Drafter, DrafterContext
from emssd.drafting.checked import CheckedDrafter
from emssd.errors import ConfigError
from emssd.errors.ranges import check_options
from emssd.hooks.registry import Registry
from emssd.model import BorrowedTarget, CausalLMRunner, ModelRunner, TargetModel, load_model
from emssd.model.load.loading import LoadModel

__all__ = ["OF_A_LOADED_MODEL", "eos_token_ids", "find_plugins", "make_parts", "options_of"]

OF_A_LOADED_MODEL = ("max_model_len", "compile", "batch_invariant", "trust_remote_code")
"""The options of a model that is loaded already."""

_MODEL, _ENGINE = ([field.name for field in fields(kind)] for kind in (ModelOptions, EngineOptions))


def options_of(
    values: Mapping[str, Any], model_options: Collection[str] = tuple(_MODEL)
) -> tuple[ModelOptions, EngineOptions]:
    """The keyword arguments `values` as options; of `ModelOptions`, only `model_options` are taken.

    Raises ConfigError: one is unknown, or has no such value.
    """
    names = [*_ENGINE, *model_options]
    if unknown := [name for name in values if name not in names]:
        names += ["drafter", "backend", "budget"]
        near = difflib.get_close_matches(unknown[0], names, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"unknown option {unknown[0]!r}{hint}; an engine takes {', '.join(names)}")
    model = ModelOptions(**{name: value for name, value in values.items() if name in _MODEL})
    check_options(model)
    return model, EngineOptions(**{name: value for name, value in values.items() if name in _ENGINE})


def find_plugins(registry: Registry, drafter: Any, backend: Any, budget: Any) -> None:
    """Look up all names, before weights are loaded. Raises PluginError or ConfigError: one cannot be."""
    for kind, choice, ready in (
        ("drafter", drafter, (Drafter, list)),
        ("budget", budget, BudgetPolicy),
        ("backend", backend, ()),
    ):
        if not isinstance(choice, ready):
            registry.resolve(kind, choice)


def make_parts(
    target: TargetModel,
    tokenizer: Any,
    drafter: Any,
    backend: Any,
    budget: Any,
    options: EngineOptions,
    registry: Registry,
    *,
    eos: Iterable[int] | None = None,
    load: LoadModel = load_model,
) -> dict[str, Any]:
    """The arguments of an `Engine` for `target`; see `Engine.assemble`."""
    caches = Caches(backend, options, target.kv_cache_spec(options.batch_size), registry)
    drafter_name = budget_name = context = None
    if isinstance(drafter, list) and not (drafter and all(isinstance(one, Drafter) for one in drafter)):
        raise ConfigError(f"drafter is {drafter}; a list holds instances of Drafter: name one plugin, or 'cascade'")
    if not isinstance(drafter, (Drafter, list)):
        plugin, config = registry.resolve("drafter", drafter)
        drafter_name = f"{plugin.name!r} ({registry.source('drafter', plugin.name)})"
        context = _context(target, tokenizer, options, caches, registry, load)
        drafter = registry.build("drafter", plugin, config, context)
    if not isinstance(budget, BudgetPolicy):
        plugin, config = registry.resolve("budget", budget)
        budget_name = f"{plugin.name!r} ({registry.source('budget', plugin.name)})"
        budget = registry.build("budget", plugin, config)
    drafters = [
        CheckedDrafter(one, drafter_name, target.vocab_size, on_error=options.on_drafter_error)
        for one in ([drafter] if isinstance(drafter, Drafter) else drafter)
    ]
    target.compile()
    cache = caches.make(trees=any(one.drafts_trees for one in drafters))
    caches.allocate(target.group.least)
    runner = CausalLMRunner(target, cache)
    if context is not None and context.target is not None:
        context.target.attach(runner)
    return {
        "runner": runner,
        "drafter": drafters,
        "tokenizer": tokenizer,
        "scheduler": caches.scheduler(),
        "budget": budget,
        "eos_token_ids": eos_token_ids(target, tokenizer) if eos is None else frozenset(eos),
        "budget_name": budget_name,
        "force_tokens": options.force_tokens,
        "make_timer": StepTimer if target.group.size == 1 else partial(SharedTimer, target.group),
    }


def _context(
    target: TargetModel, tokenizer: Any, options: EngineOptions, caches: Caches, registry: Registry, load: LoadModel
) -> DrafterContext:
    def load_runner(path: str, *, trees: bool = False, accept: Any = None) -> tuple[ModelRunner, Any]:
        if Path(source_of(path)).resolve() == Path(target.model.name_or_path).resolve():
            logging.getLogger("emssd").warning("draft model %r is the target: it gains nothing; try drafter=self", path)
        trust = target.options.trust_remote_code
        draft_options = ModelOptions(
            path, dtype=str(target.dtype), device=str(target.device), compile=False, trust_remote_code=trust
        )
        model, model_tokenizer = load(draft_options, accept=accept, draft_of=target)
        model.compile()
        cache = caches.make(model.kv_cache_spec(options.batch_size), trees=trees)
        return CausalLMRunner(model, cache), model_tokenizer

    def make_drafter(name: str, values: Mapping[str, Any]) -> Drafter:
        config = registry.configured("drafter", name, values)
        drafter: Drafter = registry.build("drafter", registry.find("drafter", name), config, context)
        return drafter

    context = DrafterContext(
        vocab_size=target.vocab_size,
        tokenizer=tokenizer,
        load_runner=load_runner,
        make_drafter=make_drafter,
        on_drafter_error=options.on_drafter_error,
        target=BorrowedTarget(target),
        cache_spec=replace(caches.target, devices=()),  # layers of its own are where the logits are
        make_cache=lambda spec: caches.make(spec, trees=spec.trees),
    )
    return context


def eos_token_ids(target: TargetModel, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a sequence: the model's generation config, else its config, else its tokenizer; may be empty.
    Raises ConfigError: these are no token ids.
    """
    for source in (getattr(target.model, "generation_config", None), target.model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            ids = eos if isinstance(eos, (list, tuple)) else [eos]
            if not all(type(token) is int for token in ids):
                raise ConfigError(
                    f"the model's eos_token_id is {eos!r}; it must be a token id or a list of token ids. Mend it in "
                    f"generation_config.json, or in config.json if that has none"
                )
            return frozenset(ids)
    return frozenset()
