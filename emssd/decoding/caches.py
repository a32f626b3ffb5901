"""The KV caches of one engine, the target's and those of its drafters' models, under one limit of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.attention.pool import kv_bytes
from emssd.attention.spread import SpreadBackend, free_for
from emssd.decoding.options import Admission, Batching, EngineOptions
from emssd.decoding.scheduler import ContinuousScheduler, Scheduler, StaticScheduler
from emssd.errors import ConfigError, PluginError
from emssd.errors.faults import guarded
from emssd.hooks.registry import Registry

__all__ = ["Caches", "make_backend"]

_GPU_SHARE = "0.9"  # of the free memory; the rest is for activations


def make_backend(spec: KVCacheSpec, choice: Any, registry: Registry) -> AttentionBackend:
    """A backend allocated for `spec`. Raises PluginError: the backend cannot serve it, with its reasons."""
    owner, backend = _built(spec, choice, registry)
    with guarded(owner, "allocate"):
        backend.allocate(spec)
    return backend


@dataclass(slots=True)
class Caches:
    """First every cache is asked for, then the memory is divided, so that all of them hold equally many tokens."""

    backend: Any
    options: EngineOptions
    target: KVCacheSpec
    registry: Registry
    _made: list[tuple[str, AttentionBackend, KVCacheSpec]] = field(default_factory=list)

    def __post_init__(self) -> None:
        caching, batching = self.options.prefix_caching, self.options.batching
        # With `continuous`, a backend that cannot has refused when it was made.
        continuous = self._can(continuous=True) if batching is Batching.auto else batching is Batching.continuous
        self.target = dataclasses.replace(self.target, continuous=continuous, prefix_caching=caching)

    def make(self, other: KVCacheSpec | None = None, *, trees: bool = False) -> AttentionBackend:
        """The target's backend, or that of a drafter's model with the cache `other`; of use after `allocate`. Raises
        PluginError: the backend cannot serve it, with its reasons.
        """
        spec = dataclasses.replace(other or self.target, continuous=self.target.continuous, trees=trees)
        limited = spec if self._limit() is None else dataclasses.replace(spec, max_tokens=1)
        owner, backend = _built(limited, self.backend, self.registry)
        self._made.append((owner, backend, spec))
        return backend

    def allocate(self, least: Callable[[int], int] = int) -> None:
        """Divide the memory among all that were made; `least` says of this process's limit what all can keep to.
        Raises ConfigError: the user's limit is none.
        """
        limit = kv_bytes(self._limit(), self.target.device, lambda: least(free_for(self.target)))
        states = sum(spec.bytes_per_row * spec.max_batch_size for _, _, spec in self._made)
        costs = []
        for owner, backend, spec in self._made:
            with guarded(owner, "bytes_per_token"):
                costs.append((backend.bytes_per_token(spec), spec.bytes_per_token()))
        has_kv = any(held for held, _ in costs)  # else there are states alone
        if limit is not None and states:
            limit -= states
            if limit < has_kv:
                raise ConfigError(
                    f"kv_memory must hold the states of {self.target.max_batch_size} rows, which take "
                    f"{states / 2**20:,.3g} MiB, and KV beside them; raise kv_memory, or lower batch_size"
                )
        max_tokens = [None] * len(costs) if limit is None or not has_kv else shares(limit, costs)
        for (owner, backend, spec), most in zip(self._made, max_tokens, strict=True):
            with guarded(owner, "allocate"):
                backend.allocate(dataclasses.replace(spec, max_tokens=most))

    def scheduler(self) -> Scheduler:
        """The scheduler, as far as the backend can."""
        options = self.options
        if not self.target.continuous:
            return StaticScheduler(options.batch_size)
        worst_case = options.admission is Admission.worst_case
        return ContinuousScheduler(options.batch_size, options.max_step_tokens, worst_case=worst_case)

    def _limit(self) -> str | None:
        """The user's limit; else, on a GPU, most of the free memory, if the backend keeps to limits at all."""
        if self.options.kv_memory is not None or self.target.device.type == "cpu":
            return self.options.kv_memory
        return _GPU_SHARE if self._can(max_tokens=1) else None

    def _can(self, **more: Any) -> bool:
        """Whether the backend has no further reason against the target's cache if that has `more`."""
        counts = []
        for spec in (dataclasses.replace(self.target, **more), self.target):
            owner, _, backend = _made(spec, self.backend, self.registry)
            counts.append(len(_unsupported(backend, spec, owner)))
        return counts[0] <= counts[1]


def shares(limit: int, costs: list[tuple[int, int]]) -> list[int]:
    """The `max_tokens` of caches that together take at most `limit` bytes and all hold equally many tokens.

    Args:
        costs: for each cache the bytes that a token takes in it, and those that `KVCacheSpec.max_tokens` counts for
            one: the memory of so many tokens is what the cache may take, padding or not.
    """

    def divided(num_tokens: int) -> list[int]:
        return [-(-num_tokens * held // counted) for held, counted in costs]

    num_tokens = limit // sum(held for held, _ in costs)
    if sum(most * counted for most, (_, counted) in zip(divided(num_tokens), costs, strict=True)) > limit:
        num_tokens -= 1  # rounding up takes less than a token of each
    return divided(max(num_tokens, 0))


def _built(spec: KVCacheSpec, choice: Any, registry: Registry) -> tuple[str, AttentionBackend]:
    """The plugin as errors call it, and its backend."""
    owner, name, backend = _made(spec, choice, registry)
    if reasons := _unsupported(backend, spec, owner):
        other = "" if name == "ragged" else ". Try backend=ragged."
        raise PluginError(f"backend {name!r} cannot serve this model: {'; '.join(reasons)}{other}")
    return owner, backend


def _made(spec: KVCacheSpec, choice: Any, registry: Registry) -> tuple[str, str, AttentionBackend]:
    """The plugin as errors call it, its name, and its backend; one for each device, if `spec` has several."""
    plugin, config = registry.resolve("backend", choice)

    def make() -> AttentionBackend:
        backend: AttentionBackend = registry.build("backend", plugin, config)
        return backend

    return registry.owner("backend", plugin.name), plugin.name, SpreadBackend(make, spec) if spec.devices else make()


def _unsupported(backend: AttentionBackend, spec: KVCacheSpec, owner: str) -> list[str]:
    with guarded(owner, "unsupported"):
        if spec.trees and not backend.takes_trees:
            return ["it takes no token trees, and the drafter drafts them"]
        if spec.has_sinks and not backend.takes_sinks:
            return ["it computes no attention sinks, and the model has them"]
        if spec.devices and not backend.takes_devices:
            return ["it takes no layers on several devices, and model.device_map puts them there"]
        reasons = backend.unsupported(spec)
        if not isinstance(reasons, list) or not all(isinstance(reason, str) for reason in reasons):
            raise PluginError(f"unsupported of {owner} returned {reasons!r}; give a list of sentences")
    return reasons
