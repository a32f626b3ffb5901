"""Tensor parallel, as far as plugins are concerned: by what recipe each process makes its KV cache."""

from __future__ import annotations

import dataclasses
from typing import Any

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.decoding.caches import make_backend
from emssd.model import BorrowedTarget, CausalLMRunner, TargetModel
from emssd.model.parallel.follower import follow
from emssd.model.parallel.group import join
from emssd.model.parallel.leader import LeadingRunner
from emssd.model.parallel.lending import LendingShard
from emssd.plugins.registry import Registry

__all__ = ["follow_unless_first", "lent", "make_runner"]


def make_runner(
    target: TargetModel, backend: AttentionBackend, spec: KVCacheSpec, choice: Any, registry: Registry
) -> CausalLMRunner:
    """The runner of a target, whole or in shards. The `backend` is made by `choice`, and allocated for `spec`."""
    if target.shard is None:
        return CausalLMRunner(target, backend)
    plugin, config = registry.resolve("backend", choice)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(plugin.config)}
    return LeadingRunner(target, backend, spec, (plugin.name, values))


def lent(target: TargetModel) -> BorrowedTarget:
    """The parts of a target, whole or in shards, that drafters may borrow."""
    return BorrowedTarget(target) if target.shard is None else LendingShard(target)


def follow_unless_first(registry: Registry) -> None:
    """Process 0 of a tensor parallel run goes on; the others do their part here until it ends, and end then."""

    def make(recipe: tuple[str, dict[str, Any]], spec: KVCacheSpec) -> AttentionBackend:
        name, values = recipe
        return make_backend(spec, registry.find("backend", name).config(**values), registry)

    group = join()
    if group.rank == 0:
        return
    try:
        follow(group, make)
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # process 0 says what there is to say
    raise SystemExit(0)
