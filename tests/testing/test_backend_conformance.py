"""First-party backends pass the suite of backends; planted faults do not, and are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from emssd.attention import Kept, KVCacheSpec, KVUsage, PackedInputs, StepPlan
from emssd.errors import OutOfMemoryError
from emssd.testing import AttentionBackendConformance
from emssd.testing.conformance.suite import Suite
from emssd.testing.oracle import DenseBackend
from tests.testing.conftest import Verdicts, broken, planted

pytestmark = pytest.mark.costly("holds a plugin to every rule")


class TestRagged(AttentionBackendConformance):
    plugin = "ragged"
    num_examples = 5


class TestPadded(AttentionBackendConformance):
    plugin = "padded"
    num_examples = 5


class Fault(DenseBackend):
    """The dense reference, which is right, with something wrong."""


class NoReasons(Fault):
    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        return None  # type: ignore[return-value]  # that is the fault


class ForgetsItsReasons(Fault):
    def __init__(self) -> None:
        super().__init__()
        self.allocated = False

    def allocate(self, spec: KVCacheSpec) -> None:
        super().allocate(spec)
        self.allocated = True

    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        return ["it is allocated already"] if self.allocated else []


class WrongPositions(Fault):
    def plan(self, packed: PackedInputs) -> StepPlan:
        plan = super().plan(packed)
        return replace(plan, position_ids=plan.position_ids + 1)


class WrongTokens(Fault):
    def plan(self, packed: PackedInputs) -> StepPlan:
        return replace(super().plan(packed), token_index=torch.full((packed.num_tokens,), packed.num_tokens - 1))


class WrongLogits(Fault):
    def plan(self, packed: PackedInputs) -> StepPlan:
        plan = super().plan(packed)
        return replace(plan, logits_to_keep=plan.logits_to_keep * 0)


class NotFinite(Fault):
    def forward(self, *arguments: Any) -> torch.Tensor:
        return super().forward(*arguments) / 0


class WrongShape(Fault):
    def forward(self, *arguments: Any) -> torch.Tensor:
        return super().forward(*arguments).flatten(1)


class NoWindow(Fault):
    def allocate(self, spec: KVCacheSpec) -> None:
        super().allocate(replace(spec, layers=tuple(replace(layer, sliding_window=None) for layer in spec.layers)))


class MultipliesByZero(Fault):
    """Hides what others hold behind a weight of zero, which NaN and infinity shine through."""

    def forward(self, *arguments: Any) -> torch.Tensor:
        return super().forward(*arguments) + 0 * arguments[4].sum()


class MultipliesSiblingsByZero(Fault):
    """In rows with trees alone, so that chains are right."""

    def forward(self, plan: StepPlan, *arguments: Any) -> torch.Tensor:
        out = super().forward(plan, *arguments)
        for row, tree in enumerate(plan.attention.trees or ()):
            stop = plan.attention.qo_indptr[row + 1]
            if tree:
                out[stop - len(tree) : stop] += 0 * arguments[3][stop - len(tree) : stop].sum()
        return out


class KeepsRejectedSiblings(Fault):
    """Keeps the first tokens of each row, not those that were accepted."""

    def commit(self, kept: Kept) -> None:
        super().commit(replace(kept, sources=()))


class ReadsOldPages(Fault):
    """Multiplies by zero what a row before it left behind."""

    def __init__(self) -> None:
        super().__init__()
        self._left = 0.0

    def release(self, request_ids: Iterable[str]) -> None:
        names = [name for name in request_ids if name in self._values]
        self._left += sum(float(values.sum()) for name in names for values in self._values[name])
        super().release(names)

    def forward(self, *arguments: Any) -> torch.Tensor:
        return super().forward(*arguments) + 0 * self._left


class RemembersFailedSteps(Fault):
    """The next step reads the KV of a step that failed."""

    def plan(self, packed: PackedInputs) -> StepPlan:
        for name, kv_len, length in zip(packed.request_ids, packed.kv_lens, packed.lengths, strict=True):
            if self._lengths.get(name, 0) > kv_len - length:
                for stored in self._values[name]:
                    stored += 1
        return super().plan(packed)


class RefusesToTryAgain(Fault):
    """Wants a commit before the next step of the same rows."""

    def plan(self, packed: PackedInputs) -> StepPlan:
        for name, kv_len, length in zip(packed.request_ids, packed.kv_lens, packed.lengths, strict=True):
            assert self._lengths.get(name, 0) <= kv_len - length, "a step was not committed"
        return super().plan(packed)


class NoPadding(Fault):
    @property
    def kv_usage(self) -> KVUsage:
        return replace(super().kv_usage, padding=None)  # type: ignore[arg-type]  # that is the fault


class GainsByPadding(Fault):
    @property
    def kv_usage(self) -> KVUsage:
        return replace(super().kv_usage, padding=-1)


class FallingPeak(Fault):
    @property
    def kv_usage(self) -> KVUsage:
        held = super().kv_usage.held
        return KVUsage(held, held, held)


class KeepsAll(Fault):
    def release(self, request_ids: Iterable[str]) -> None:
        pass


class MissesUnknownIds(Fault):
    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self._lengths[request_id]
            super().release([request_id])


class AlwaysFits(Fault):
    """Runs out of memory where it said that there was room."""

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        return True

    def plan(self, packed: PackedInputs) -> StepPlan:
        if not super().fits(dict(zip(packed.request_ids, packed.kv_lens, strict=True))):
            raise OutOfMemoryError("no room")
        return super().plan(packed)


class AllocatesTooMuch(Fault):
    @property
    def kv_usage(self) -> KVUsage:
        usage = super().kv_usage
        return KVUsage(usage.held, usage.peak_held, usage.peak_pool + 10**6)


class Crashes(Fault):
    def commit(self, kept: Kept) -> None:
        raise KeyError("of its own")


class CountsRows(Fault):
    """A row's last bit depends on the number of rows."""

    batch_invariant = True

    def plan(self, packed: PackedInputs) -> StepPlan:
        self._grows = 1.0 + (len(packed.request_ids) > 1) * 1e-15
        return super().plan(packed)

    def forward(self, *given: Any) -> torch.Tensor:
        return super().forward(*given) * self._grows


class WrongAfterPieces(Fault):
    """Right in every step by itself, and wrong about rows that the machine of histories never has: of one token."""

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        for lengths in self._lengths:
            for stored in (*self._keys[lengths], *self._values[lengths]):
                stored.zero_()
        return super().fits(kv_lens)


SHARED = DenseBackend()

FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "builds the same again": ("backend.build", lambda: SHARED),
    "builds no backend": ("backend.build", lambda: "dense"),
    "gives no reasons": ("backend.unsupported", NoReasons),
    "forgets its reasons": ("backend.unsupported", ForgetsItsReasons),
    "counts positions from one": ("backend.plan", WrongPositions),
    "points at the first logits": ("backend.plan", WrongLogits),
    "takes the last token for every one": ("backend.plan", WrongTokens),
    "divides by zero": ("backend.output", NotFinite),
    "flattens heads": ("backend.output", WrongShape),
    "ignores windows": ("backend.attention", NoWindow),
    "keeps rejected siblings": ("backend.attention", KeepsRejectedSiblings),
    "multiplies siblings by zero": ("backend.isolation", MultipliesSiblingsByZero),
    "multiplies by zero": ("backend.isolation", MultipliesByZero),
    "reads old pages": ("backend.isolation", ReadsOldPages),
    "remembers failed steps": ("backend.retry", RemembersFailedSteps),
    "refuses to try again": ("backend.retry", RefusesToTryAgain),
    "says nothing of padding": ("backend.commit", NoPadding),
    "gains by padding": ("backend.commit", GainsByPadding),
    "has a peak that falls": ("backend.memory", FallingPeak),
    "keeps all": ("backend.release", KeepsAll),
    "misses unknown ids": ("backend.release", MissesUnknownIds),
    "always fits": ("backend.fits", AlwaysFits),
    "allocates too much": ("backend.fits", AllocatesTooMuch),
    "crashes": ("backend.raises", Crashes),
    "counts rows": ("backend.batch_invariant", CountsRows),
    "forgets when asked for room": ("backend.lossless", WrongAfterPieces),
}


def suite(make: Callable[[], Any], **attributes: Any) -> type[Suite]:
    return planted(AttentionBackendConformance, "make_backend", lambda self: make(), **attributes)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.costly("plays random histories until the fault shows")
def test_a_planted_fault_is_found_and_its_rule_is_named(fault: str, verdicts: Verdicts) -> None:
    rule, make = FAULTS[fault]
    found = verdicts(suite(make), rule)
    assert broken(found) == {rule}, found
