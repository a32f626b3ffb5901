"""Puts an engine together from names and configs; the only place that knows both the registry and the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.budget import BudgetPolicy
from emssd.draft import Drafter, DrafterContext
from emssd.engine import Engine
from emssd.errors import ConfigError, PluginError
from emssd.memory import kv_bytes
from emssd.model import LoadModel, TargetModel, load_model
from emssd.options import DEFAULT_DRAFTER, Admission, Batching, EngineOptions
from emssd.registry import Registry
from emssd.scheduler import ContinuousScheduler, Scheduler, StaticScheduler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["assemble", "eos_token_ids", "from_model", "from_pretrained", "make_backend"]

_GPU_SHARE = "0.9"  # of the free memory; the rest is for activations


def from_pretrained(
    path: str = "demo",
    *,
    drafter: Any = DEFAULT_DRAFTER,
    backend: Any = "ragged",
    budget: Any = "adaptive",
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    compile: bool = False,
    **options: Any,
) -> Engine:
    """Load a model and build an engine for it.

    Args:
        path: local folder, hub id, or ``demo`` for the embedded model.
        drafter: a name such as ``"llma"``, a plugin's config such as ``LLMAConfig(copy_length=10)``, or a `Drafter`.
        backend: a name or a plugin's config.
        budget: a name, a plugin's config, or a `BudgetPolicy`.
        dtype, device, max_model_len, compile: see `emssd.model.load_model`.
        options: fields of `emssd.options.EngineOptions`, such as ``batch_size=16``.
    """
    chosen, registry = _options(options), Registry()
    # All names are looked up before the weights are loaded.
    for kind, choice, ready in (("drafter", drafter, Drafter), ("budget", budget, BudgetPolicy)):
        if not isinstance(choice, ready):
            registry.resolve(kind, choice)
    registry.resolve("backend", backend)
    target, tokenizer = load_model(path, dtype=dtype, device=device, max_model_len=max_model_len, compile=compile)
    return assemble(
        target, tokenizer, drafter=drafter, backend=backend, budget=budget, options=chosen, registry=registry
    )


def from_model(
    model: PreTrainedModel,
    tokenizer: Any = None,
    *,
    drafter: Any = DEFAULT_DRAFTER,
    backend: Any = "ragged",
    budget: Any = "adaptive",
    max_model_len: int | None = None,
    compile: bool = False,
    **options: Any,
) -> Engine:
    """Build an engine around a model that is already loaded; see `from_pretrained` for the options."""
    chosen = _options(options)
    target = TargetModel(model, max_model_len=max_model_len, compile=compile)
    return assemble(target, tokenizer, drafter=drafter, backend=backend, budget=budget, options=chosen)


def assemble(
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
) -> Engine:
    """An engine for `target`; `drafter`, `backend` and `budget` as in `from_pretrained`; `load` is for drafters."""
    registry, options = registry or Registry(), options or EngineOptions()
    caches = _Caches(backend, options, target.kv_cache_spec(options.batch_size), registry)
    drafter_name = None
    if not isinstance(drafter, Drafter):
        plugin, config = registry.resolve("drafter", drafter)
        drafter_name = f"{plugin.name!r} ({registry.source('drafter', plugin.name)})"
        drafter = plugin.build(config, _context(target, tokenizer, options, caches, registry, load))
    if not isinstance(budget, BudgetPolicy):
        plugin, config = registry.resolve("budget", budget)
        budget = plugin.build(config)
    return Engine(
        target,
        caches.make(),
        drafter,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(target, tokenizer) if eos is None else eos,
        scheduler=caches.scheduler(),
        budget=budget,
        drafter_name=drafter_name,
        on_drafter_error=options.on_drafter_error,
    )


def make_backend(spec: KVCacheSpec, choice: Any, registry: Registry) -> AttentionBackend:
    """A backend allocated for `spec`.

    Raises:
        PluginError: the backend cannot serve it, with its reasons.
    """
    plugin, config = registry.resolve("backend", choice)
    backend: AttentionBackend = plugin.build(config)
    if reasons := backend.unsupported(spec):
        other = "" if plugin.name == "ragged" else ". Try backend=ragged."
        raise PluginError(f"backend {plugin.name!r} cannot serve this model: {'; '.join(reasons)}{other}")
    backend.allocate(spec)
    return backend


@dataclass(slots=True)
class _Caches:
    """The KV caches of one engine: the target's and those of its drafter's models, under one limit of memory."""

    backend: Any
    options: EngineOptions
    target: KVCacheSpec
    registry: Registry
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        self.target = dataclasses.replace(self.target, continuous=self._is_continuous())

    def make(self, other: KVCacheSpec | None = None) -> AttentionBackend:
        """The target's backend, or that of a drafter's model with the cache `other`, for as many tokens."""
        if self.max_tokens is None:
            limit = kv_bytes(self._limit(), self.target.device)
            together = self.target.bytes_per_token() + (other.bytes_per_token() if other else 0)
            self.max_tokens = None if limit is None else limit // together
        spec = dataclasses.replace(other or self.target, continuous=self.target.continuous, max_tokens=self.max_tokens)
        return make_backend(spec, self.backend, self.registry)

    def scheduler(self) -> Scheduler:
        """Who runs when, as far as the backend can."""
        options = self.options
        if not self.target.continuous:
            return StaticScheduler(options.batch_size)
        worst_case = options.admission is Admission.worst_case
        return ContinuousScheduler(options.batch_size, options.max_step_tokens, worst_case=worst_case)

    def _limit(self) -> str | None:
        """What the user asks for; else, on a GPU, most of what is free, if the backend keeps to limits at all."""
        if self.options.kv_memory is not None or self.target.device.type == "cpu":
            return self.options.kv_memory
        limited = dataclasses.replace(self.target, max_tokens=1)
        return _GPU_SHARE if len(self._reasons(limited)) <= len(self._reasons(self.target)) else None

    def _is_continuous(self) -> bool:
        """``auto`` asks the backend whether it could; a backend that is told and cannot says so when it is made."""
        if self.options.batching is not Batching.auto:
            return self.options.batching is Batching.continuous
        asked = dataclasses.replace(self.target, continuous=True)
        return len(self._reasons(asked)) <= len(self._reasons(self.target))

    def _reasons(self, spec: KVCacheSpec) -> list[str]:
        plugin, config = self.registry.resolve("backend", self.backend)
        backend: AttentionBackend = plugin.build(config)
        return backend.unsupported(spec)


def _context(
    target: TargetModel,
    tokenizer: Any,
    options: EngineOptions,
    caches: _Caches,
    registry: Registry,
    load: LoadModel | None = None,
) -> DrafterContext:
    def load_alike(path: str) -> tuple[TargetModel, Any]:
        dtype, compiled = str(target.dtype).removeprefix("torch."), target.compiled is not None
        return (load or load_model)(path, dtype=dtype, device=str(target.device), compile=compiled)

    def make_drafter(name: str, values: Mapping[str, Any]) -> Drafter:
        plugin = registry.find("drafter", name)
        known = [field.name for field in dataclasses.fields(plugin.config)]
        if unknown := [value for value in values if value not in known]:
            raise ConfigError(f"drafter {name!r} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
        drafter: Drafter = plugin.build(plugin.config(**values), context)
        return drafter

    context = DrafterContext(
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        max_batch_size=options.batch_size,
        device=target.device,
        dtype=target.dtype,
        tokenizer=tokenizer,
        load_model=load_alike,
        make_backend=caches.make,
        make_drafter=make_drafter,
    )
    return context


def _options(given: dict[str, Any]) -> EngineOptions:
    known = {field.name: field for field in dataclasses.fields(EngineOptions)}
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(f"unknown option {unknown[0]!r}; an engine takes {', '.join(known)}")
    for name, kind in (("batching", Batching), ("admission", Admission)):
        if name in given:
            try:
                given = given | {name: kind(given[name])}
            except ValueError:
                raise ConfigError(f"{name} is {given[name]!r}; choose {', '.join(kind)}") from None
    return EngineOptions(**given)


def eos_token_ids(target: TargetModel, tokenizer: Any) -> frozenset[int]:
    """What ends a sequence: the model's generation config, else its config, else its tokenizer; may be empty."""
    for source in (getattr(target.model, "generation_config", None), target.model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, (list, tuple)) else [eos])
    return frozenset()
