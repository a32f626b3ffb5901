"""A backend under observation: the rules of the interface are tested in every call; a failure names one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from emssd.attention import AttentionBackend, Kept, KVCacheSpec, KVUsage, PackedInputs, StepPlan
from emssd.testing.conformance.rules import assertions, broken, named
from emssd.testing.machines import check_plan

__all__ = ["WatchedBackend"]


class WatchedBackend(AttentionBackend):
    """Passes every call on to another backend, and names what one breaks."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.takes_trees, self.takes_sinks = backend.takes_trees, backend.takes_sinks

    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        with named("backend.unsupported", "unsupported"):
            reasons = self.backend.unsupported(spec)
        if not isinstance(reasons, list) or not all(isinstance(reason, str) and reason for reason in reasons):
            broken("backend.unsupported", f"unsupported returned {reasons!r}; give a list of sentences or an empty one")
        return ["it computes no attention sinks"] if spec.has_sinks and not self.takes_sinks else reasons

    def allocate(self, spec: KVCacheSpec) -> None:
        before = self.unsupported(spec)
        with named("backend.raises", f"allocate for {spec}"):
            self.backend.allocate(spec)
        if (after := self.unsupported(spec)) != before:
            broken("backend.unsupported", f"unsupported said {before}, and after allocate {after}")

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        with named("backend.fits", f"fits of {dict(kv_lens)}"):
            return self.backend.fits(kv_lens)

    def plan(self, packed: PackedInputs) -> StepPlan:
        with named("backend.raises", f"plan of {packed}"):
            plan = self.backend.plan(packed)
        with assertions("backend.plan"):
            check_plan(plan, packed)
        return plan

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        expected = (len(query), query.shape[1], value.shape[2])
        with named("backend.raises", f"forward of layer {layer}"):
            out = self.backend.forward(plan, layer, query, key, value)
        if not isinstance(out, torch.Tensor) or tuple(out.shape) != expected:
            shape = list(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
            broken("backend.output", f"forward of layer {layer} returned {shape}; give {list(expected)}")
        if not bool(out.isfinite().all()):
            broken("backend.output", f"forward of layer {layer} returned values that are not finite")
        return out

    def commit(self, kept: Kept) -> None:
        with named("backend.raises", f"commit of {kept}"):
            self.backend.commit(kept)
        lost = self.kv_usage.padding
        if not isinstance(lost, int) or lost < 0:
            broken("backend.commit", f"kv_usage.padding is {lost!r} after commit; give a whole number, 0 or more")

    def release(self, request_ids: Iterable[str]) -> None:
        names = list(request_ids)
        with named("backend.release", f"release of {names}"):
            self.backend.release(names)

    @property
    def kv_usage(self) -> KVUsage:
        """Memory taken now and at most."""
        with named("backend.memory", "kv_usage"):
            return self.backend.kv_usage
