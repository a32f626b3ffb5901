"""Every backend equals the dense reference after any history, and the machine that says so finds planted faults."""

from __future__ import annotations

import pytest
import torch
from emssd_ragged.fused import FusedKernels
from emssd_ragged.grouped import GroupedKernels
from emssd_testing import AttentionBackendConformance
from emssd_testing.machines import BackendMachine
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from emssd.attention import KVCacheSpec, LayerSpec
from tests.support.backends import BACKENDS, MakeBackend


def run_machine(make: MakeBackend, **changes: object) -> None:
    machine = type("Machine", (BackendMachine,), {"make_backend": lambda self: make()})
    options = settings(settings.default, stateful_step_count=12, **changes)
    run_state_machine_as_test(machine, settings=options)


def test_each_name_says_what_computes_attention(kernels: None) -> None:
    spec = KVCacheSpec((LayerSpec(2, 1, 4, 4, 1.0),), torch.float64, torch.device("cpu"), 2, 32)
    for name, attention in {"ragged-fused": FusedKernels, "ragged-page-16": GroupedKernels}.items():
        backend = BACKENDS[name]()
        backend.allocate(spec)
        assert isinstance(backend._kernels, attention)


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.hypothesis
def test_backend_equals_dense_reference_after_any_history(make: MakeBackend) -> None:
    run_machine(make, max_examples=settings.default.max_examples // 3)


def suite_of(make: MakeBackend, **options: object) -> AttentionBackendConformance:
    chosen = {"make_backend": lambda self: make(), "num_examples": 8, **options}
    return type("Suite", (AttentionBackendConformance,), chosen)()


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_backend_shows_no_query_what_is_not_its_own(make: MakeBackend) -> None:
    suite_of(make).test_no_query_sees_what_is_not_its_own()


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_backend_forgets_steps_that_failed(make: MakeBackend) -> None:
    suite_of(make).test_a_step_that_failed_never_happened()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_has_its_bits_in_any_batch_with_the_backend_that_says_so(dtype: torch.dtype, kernels: None) -> None:
    suite_of(BACKENDS["ragged-fused"], dtype=dtype).test_bits_are_those_of_a_row_alone()
