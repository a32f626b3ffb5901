"""Makes an engine from names and configs: this module knows the registry, the engine does not."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from emssd.data.model_folder import source_of
from emssd.decoding.caches import Caches
from emssd.decoding.options import DEFAULT_DRAFTER, EngineOptions
from emssd.decoding.outcome import SharedTimer, StepTimer
from emssd.drafting import BudgetPolicy, Drafter, DrafterContext
from emssd.drafting.checked import CheckedDrafter
from emssd.errors import ConfigError
from emssd.model import BorrowedTarget, CausalLMRunner, ModelRunner, TargetModel, load_model
from emssd.model.loading import LoadModel
from emssd.model.spread import DeviceMap
from emssd.model.target import Compile
from emssd.plugins.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Assembled", "eos_token_ids"]


class Assembled:
    """The class methods of `Engine` that make one from names and configs."""

    def __init__(self, runner: ModelRunner, **parts: Any) -> None:
        raise NotImplementedError("`Engine` takes these parts")

    @classmethod
    def from_pretrained(
        cls,
        path: str = "demo",
        *,
        drafter: Any = DEFAULT_DRAFTER,
        backend: Any = "ragged",
        budget: Any = "adaptive",
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        compile: Compile = "auto",
        device_map: DeviceMap | None = None,
        trust_remote_code: bool = False,
        weights: str = "auto",
        batch_invariant: bool = False,
        tensor_parallel: bool = False,
        **options: Any,
    ) -> Self:
        """Load a model and make an engine for it.

        Args:
            path: local folder, hub id, or ``demo`` for the embedded model.
            drafter: a name such as ``"llma"``, a plugin's config such as ``LLMAConfig(copy_length=10)``, a `Drafter`,
                or a list of them, asked in turn.
            backend: a name or a plugin's config.
            budget: a name, a plugin's config, or a `BudgetPolicy`.
            dtype, device, max_model_len, device_map, weights, batch_invariant: see `emssd.model.load_model`.
            compile: see there; with ``"auto"``, `generate` and `stream` also compile where a call is long enough.
            trust_remote_code: see there; it holds for draft models too.
            tensor_parallel: spread the model over the processes that torchrun started. Each of them must make the same
                calls of the engine, with the same prompts; each gets the same tokens.
            options: fields of `emssd.decoding.options.EngineOptions`, such as ``batch_size=16``.
        """
        chosen, registry = _options(options, cls.from_pretrained), Registry()
        # All names are looked up before the weights are loaded.
        for kind, choice, ready in (("drafter", drafter, (Drafter, list)), ("budget", budget, BudgetPolicy)):
            if not isinstance(choice, ready):
                registry.resolve(kind, choice)
        registry.resolve("backend", backend)
        load = partial(load_model, trust_remote_code=trust_remote_code)
        target, tokenizer = load(
            path,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            compile=compile,
            device_map=device_map,
            weights=weights,
            batch_invariant=batch_invariant,
            tensor_parallel=tensor_parallel,
        )
        return cls.assemble(
            target,
            tokenizer,
            drafter=drafter,
            backend=backend,
            budget=budget,
            options=chosen,
            registry=registry,
            load=load,
        )

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        drafter: Any = DEFAULT_DRAFTER,
        backend: Any = "ragged",
        budget: Any = "adaptive",
        max_model_len: int | None = None,
        compile: Compile = False,
        frozen: bool = False,
        batch_invariant: bool = False,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> Self:
        """Make an engine for a model that is already loaded; see `from_pretrained` for the options.

        The engine borrows the model: what it computes from the weights ends with each run, and a compiled program is
        made again. So you may train or edit the model between two runs.

        Args:
            frozen: you promise not to, so the engine keeps what it computes, as if it had loaded the model. It raises
                `UnsupportedModelError` where it sees a change; after `Engine.refresh`, it uses the model as it is then.
        """
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"Engine.from_model takes a loaded model; Engine.from_pretrained({str(model)!r:.200}) loads one"
            )
        chosen = _options(options, cls.from_model)
        load = partial(load_model, trust_remote_code=trust_remote_code)
        target = TargetModel(
            model,
            max_model_len=max_model_len,
            compile=compile,
            frozen=frozen,
            batch_invariant=batch_invariant,
        )
        return cls.assemble(
            target, tokenizer, drafter=drafter, backend=backend, budget=budget, options=chosen, load=load
        )

    @classmethod
    def assemble(
        cls,
        target: TargetModel,
        tokenizer: Any,
        *,
        drafter: Any,
        backend: Any,
        budget: Any = "adaptive",
        options: EngineOptions | None = None,
        registry: Registry | None = None,
        eos: Iterable[int] | None = None,
        load: LoadModel | None = None,
    ) -> Self:
        """Make an engine for `target`, which is ready to run.

        Args:
            drafter, backend, budget: as in `from_pretrained`.
            eos: what ends a sequence; what the model says by default.
        """
        registry, options = registry or Registry(), options or EngineOptions()
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
            CheckedDrafter(each, drafter_name, target.vocab_size, on_error=options.on_drafter_error)
            for each in ([drafter] if isinstance(drafter, Drafter) else drafter)
        ]
        own = caches.make(trees=any(each.drafts_trees for each in drafters))
        caches.allocate(target.group.least)
        runner = CausalLMRunner(target, own)
        if context is not None and context.target is not None:
            context.target.attach(runner)
        return cls(
            runner,
            drafter=drafters,
            tokenizer=tokenizer,
            scheduler=caches.scheduler(),
            budget=budget,
            eos_token_ids=eos_token_ids(target, tokenizer) if eos is None else frozenset(eos),
            budget_name=budget_name,
            force_tokens=options.force_tokens,
            make_timer=StepTimer if target.group.size == 1 else partial(SharedTimer, target.group),
        )


def _context(
    target: TargetModel,
    tokenizer: Any,
    options: EngineOptions,
    caches: Caches,
    registry: Registry,
    load: LoadModel | None = None,
) -> DrafterContext:
    def load_runner(path: str, *, trees: bool = False, accept: Any = None) -> tuple[ModelRunner, Any]:
        if Path(source_of(path)).resolve() == Path(target.model.name_or_path).resolve():
            logging.getLogger("emssd").warning("draft model %r is the target: it gains nothing; try drafter=self", path)
        dtype = str(target.dtype).removeprefix("torch.")
        compile = target.may_compile if target.compiled is not None else False
        model, own_tokenizer = (load or load_model)(
            path, dtype=dtype, device=str(target.device), compile=compile, for_drafts=True, accept=accept
        )
        cache = caches.make(model.kv_cache_spec(options.batch_size), trees=trees)
        return CausalLMRunner(model, cache), own_tokenizer

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
        cache_spec=dataclasses.replace(caches.target, devices=()),  # layers of its own are where the logits are
        make_cache=lambda spec: caches.make(spec, trees=spec.trees),
    )
    return context


def _options(given: dict[str, Any], maker: Callable[..., Any]) -> EngineOptions:
    """Options `given` to `maker` beside those it names. Raises ConfigError: one is unknown, or has no such value."""
    known = [field.name for field in dataclasses.fields(EngineOptions)]
    if unknown := [name for name in given if name not in known]:
        parameters = inspect.signature(maker).parameters.values()
        names = [*known, *(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)]
        near = difflib.get_close_matches(unknown[0], names, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"unknown option {unknown[0]!r}{hint}; an engine takes {', '.join(names)}")
    return EngineOptions(**given)


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
