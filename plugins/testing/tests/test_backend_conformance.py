"""First-party backends pass the suite of backends; planted faults do not, and are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from emssd_testing import AttentionBackendConformance
from emssd_testing.oracle import DenseBackend

from emssd.attention import Kept, KVCacheSpec, KVUsage, PackedInputs, StepPlan
from emssd.errors import OutOfMemoryError
from plugins.testing.tests.conftest import Verdicts, broken, but, fails, suite

pytestmark = pytest.mark.costly("holds a plugin to every rule")


class TestRagged(AttentionBackendConformance):
    plugin = "ragged"
    num_examples = 5


class TestPadded(AttentionBackendConformance):
    plugin = "padded"
    num_examples = 5


class Fault(DenseBackend):
    """The dense reference, which is right, with something wrong."""


class ForgetsItsReasons(Fault):
    def __init__(self) -> None:
        super().__init__()
        self.allocated = False

    def allocate(self, spec: KVCacheSpec) -> None:
        super().allocate(spec)
        self.allocated = True

    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        return ["it is allocated already"] if self.allocated else []


class MultipliesSiblingsByZero(Fault):
    """In rows with trees alone, so that chains are right."""

    def forward(self, plan: StepPlan, *arguments: Any) -> torch.Tensor:
        out = super().forward(plan, *arguments)
        for row, tree in enumerate(plan.attention.trees or ()):
            stop = plan.attention.qo_indptr[row + 1]
            if tree:
                out[stop - len(tree) : stop] += 0 * arguments[3][stop - len(tree) : stop].sum()
        return out


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


class CountsRows(Fault):
    """A row's last bit depends on the number of rows."""

    batch_invariant = True

    def plan(self, packed: PackedInputs) -> StepPlan:
        self._grows = 1.0 + (len(packed.request_ids) > 1) * 1e-15
        return super().plan(packed)

    def forward(self, *inputs: Any) -> torch.Tensor:
        return super().forward(*inputs) * self._grows


class WrongAfterPieces(Fault):
    """Right in every step by itself, and wrong about rows that the machine of histories never has: of one token."""

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        for lengths in self._lengths:
            for stored in (*self._keys[lengths], *self._values[lengths]):
                stored.zero_()
        return super().fits(kv_lens)


def planned(change: Callable[[PackedInputs, StepPlan], dict[str, Any]]) -> Any:
    """The reference, of whose plans some fields are changed."""

    def plan(self: DenseBackend, packed: PackedInputs) -> StepPlan:
        made = DenseBackend.plan(self, packed)
        return replace(made, **change(packed, made))

    return but(Fault, plan=plan)


def computed(change: Callable[..., torch.Tensor]) -> Any:
    """The reference, whose results are changed; `change` also gets the values."""
    return but(Fault, forward=lambda self, *inputs: change(DenseBackend.forward(self, *inputs), inputs[4]))


def using(change: Callable[[KVUsage], KVUsage]) -> Any:
    """The reference, whose memory is told wrong."""
    return but(Fault, kv_usage=property(lambda self: change(DenseBackend.kv_usage.fget(self))))  # type: ignore[attr-defined]


def committed(self: DenseBackend, kept: Kept) -> None:
    DenseBackend.commit(self, kept)
    torch.set_default_dtype(torch.float16)


def without_windows(self: DenseBackend, spec: KVCacheSpec) -> None:
    layers = tuple(replace(layer, sliding_window=None) for layer in spec.layers)
    DenseBackend.allocate(self, replace(spec, layers=layers))


SHARED = DenseBackend()

FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "builds the same again": ("backend.build", lambda: SHARED),
    "builds no backend": ("backend.build", lambda: "dense"),
    "gives no reasons": ("backend.unsupported", but(Fault, unsupported=lambda self, spec: None)),
    "forgets its reasons": ("backend.unsupported", ForgetsItsReasons),
    "counts positions from one": (
        "backend.plan", planned(lambda packed, plan: {"position_ids": plan.position_ids + 1})
    ),
    "points at the first logits": (
        "backend.plan", planned(lambda packed, plan: {"logits_to_keep": plan.logits_to_keep * 0})
    ),
    "takes the last token for every one": (
        "backend.plan",
        planned(lambda packed, plan: {"token_index": torch.full((packed.num_tokens,), packed.num_tokens - 1)}),
    ),
    "divides by zero": ("backend.output", computed(lambda out, values: out / 0)),
    "flattens heads": ("backend.output", computed(lambda out, values: out.flatten(1))),
    "ignores windows": ("backend.attention", but(Fault, allocate=without_windows)),
    "keeps rejected siblings": (
        "backend.attention",
        but(Fault, commit=lambda self, kept: DenseBackend.commit(self, kept._replace(sources=()))),
    ),
    "multiplies siblings by zero": ("backend.isolation", MultipliesSiblingsByZero),
    # It hides the values of other rows behind a weight of zero; NaN and infinity shine through.
    "multiplies by zero": ("backend.isolation", computed(lambda out, values: out + 0 * values.sum())),
    "reads old pages": ("backend.isolation", ReadsOldPages),
    "remembers failed steps": ("backend.retry", RemembersFailedSteps),
    "says nothing of padding": ("backend.commit", using(lambda usage: replace(usage, padding=None))),
    "has a peak that falls": ("backend.memory", using(lambda usage: KVUsage(usage.held, usage.held, usage.held))),
    "keeps all": ("backend.release", but(Fault, release=lambda self, request_ids: None)),
    "misses unknown ids": ("backend.release", MissesUnknownIds),
    "always fits": ("backend.fits", AlwaysFits),
    "allocates too much": ("backend.fits", using(lambda usage: replace(usage, peak_pool=usage.peak_pool + 10**6))),
    "sets the default dtype": ("backend.process", but(Fault, commit=committed)),
    "crashes": ("backend.raises", but(Fault, commit=fails)),
    "counts rows": ("backend.batch_invariant", CountsRows),
    "forgets when asked for room": ("backend.lossless", WrongAfterPieces),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.costly("plays random histories until the fault shows")
def test_a_planted_fault_is_found_and_its_rule_is_named(fault: str, verdicts: Verdicts) -> None:
    rule, make = FAULTS[fault]
    results = verdicts(suite("backend", make), rule)
    assert broken(results) == {rule}, results
