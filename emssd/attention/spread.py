"""`SpreadBackend`: a KV cache over several devices, where a model's layers are; and which tensor goes where.

A layer's KV and the tables of its attention lie on the layer's device. The model's inputs and the indices of logits lie
on the cache's own device, where the logits come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from emssd.attention.interface import AttentionBackend, Kept, KVCacheSpec, KVUsage, Replay, StepPlan
from emssd.attention.packed import PackedInputs
from emssd.attention.pool import free_bytes

__all__ = ["SpreadBackend", "free_for"]


def parts_of(spec: KVCacheSpec) -> dict[torch.device, tuple[tuple[int, ...], KVCacheSpec]]:
    """By device the layers whose KV lies there, as indices into ``spec.layers``, and the cache that holds it.

    Each part holds as many tokens as the whole. Parts share no prefixes: their pages are given out independently.
    """
    indices: dict[torch.device, list[int]] = {}
    for index, device in enumerate(spec.devices or (spec.device,) * len(spec.layers)):
        indices.setdefault(device, []).append(index)
    whole = replace(spec, devices=(), prefix_caching=False)
    return {
        device: (tuple(some), replace(whole, layers=tuple([spec.layers[index] for index in some]), device=device))
        for device, some in indices.items()
    }


def free_for(spec: KVCacheSpec) -> int:
    """Bytes that the cache could take until one of its devices is full, all layers holding equally many tokens."""
    whole, parts = spec.bytes_per_token(), parts_of(spec)
    return min(free_bytes(device) * whole // part.bytes_per_token() for device, (_, part) in parts.items())


class SpreadBackend(AttentionBackend):
    """One backend for each device. Each plans a step once and computes the attention of its own layers."""

    def __init__(self, make: Callable[[], AttentionBackend], spec: KVCacheSpec) -> None:
        self._parts = {device: make() for device in parts_of(spec)}
        self.takes_trees = all(part.takes_trees for part in self._parts.values())
        self.takes_sinks = all(part.takes_sinks for part in self._parts.values())
        self.takes_devices = all(part.takes_devices for part in self._parts.values())

    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        parts = parts_of(spec).items()
        return [*dict.fromkeys(why for device, (_, part) in parts for why in self._parts[device].unsupported(part))]

    def allocate(self, spec: KVCacheSpec) -> None:
        self._device, self._homes = spec.device, dict[int, tuple[torch.device, int]]()
        for device, (layers, part) in parts_of(spec).items():
            self._parts[device].allocate(part)
            self._homes |= {layer: (device, index) for index, layer in enumerate(layers)}

    def bytes_per_token(self, spec: KVCacheSpec) -> int:
        return sum(self._parts[device].bytes_per_token(part) for device, (_, part) in parts_of(spec).items())

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        return all(part.fits(kv_lens) for part in self._parts.values())

    def plan(self, packed: PackedInputs) -> StepPlan:
        plans = {device: part.plan(packed) for device, part in self._parts.items()}
        fed = plans.get(self._device) or next(iter(plans.values()))

        def moved(value: Any) -> Any:
            return value.to(self._device) if isinstance(value, torch.Tensor) else value

        replays = [plan.replay for plan in plans.values() if plan.replay is not None]
        return StepPlan(
            input_ids=moved(fed.input_ids),
            position_ids=moved(fed.position_ids),
            logits_to_keep=moved(fed.logits_to_keep),
            logit_index=moved(fed.logit_index),
            attention=plans,
            replay=reduce(_within, replays) if replays else None,
            token_index=moved(fed.token_index),
        )

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        device, index = self._homes[layer]
        return self._parts[device].forward(plan.attention[device], index, query, key, value)

    def commit(self, kept: Kept) -> None:
        for part in self._parts.values():
            part.commit(kept)

    def release(self, request_ids: Iterable[str]) -> None:
        names = tuple(request_ids)
        for part in self._parts.values():
            part.release(names)

    @property
    def kv_usage(self) -> KVUsage:
        usages = [part.kv_usage for part in self._parts.values()]
        return KVUsage(
            held=sum(usage.held for usage in usages),
            peak_held=sum(usage.peak_held for usage in usages),
            peak_pool=sum(usage.peak_pool for usage in usages),
            padding=max(usage.padding for usage in usages),
        )


def _within(outer: Replay, inner: Replay) -> Replay:
    """`inner` within `outer`: if a part is not content with its own layers, the layers of the others run again too."""
    return lambda compute: outer(lambda: inner(compute))
