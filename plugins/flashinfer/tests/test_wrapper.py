"""Calls of FlashInfer, on the CPU: its compiled kernels are replaced by plain PyTorch.

Where FlashInfer is installed (``benchmarks/compile_flashinfer.py --test`` sees to it), all of its own Python code runs;
elsewhere a stand-in for its wrapper does. What reaches the kernels (tables, masks, windows, scales, buffers of recorded
steps) is held against the dense reference like any backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from emssd_flashinfer.kernels import FlashInferKernels
from emssd_testing.machines import BackendMachine
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from emssd.attention import KVCacheSpec, LayerSpec, PagedBackend
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.errors import PluginError
from emssd.sequences import Request, Row
from tests.support.reference_kernels import ReferenceKernels, rerun, tree_attention

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the real kernels")

CPU = torch.device("cpu")
LAYER = LayerSpec(num_qo_heads=4, num_kv_heads=2, key_dim=10, value_dim=7, scale=0.3)
SPEC = KVCacheSpec((LAYER,), torch.float64, CPU, max_batch_size=4, max_model_len=64)


class CpuKernels(FlashInferKernels):
    def unsupported(self, spec: KVCacheSpec, page_size: int) -> list[str]:
        return []


def backend(page_size: int = 16, **options: Any) -> PagedBackend:
    return PagedBackend(CpuKernels(**options), page_size=page_size, memory_fraction=1.0)


def step(made: PagedBackend, length: int, name: str = "a") -> torch.Tensor:
    """A prompt through the first layer."""
    plan = made.plan(pack([Row(Request(name, tuple(range(length)), 9))], Draft.empty(1)))
    count = plan.input_ids.numel()
    shapes = ((count, 4, 10), (count, 2, 10), (count, 2, 7))
    return made.forward(plan, 0, *(torch.ones(shape, dtype=torch.float64) for shape in shapes))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.hypothesis
def test_it_equals_the_dense_reference_after_any_history(recorded: bool, modules: list[Any]) -> None:
    options: dict[str, Any] = {"capture": rerun, "max_graph_tokens": 12} if recorded else {}
    machine = type("Machine", (BackendMachine,), {"make_backend": lambda self: backend(page_size=3, **options)})
    chosen = settings(settings.default, max_examples=settings.default.max_examples // 3, stateful_step_count=10)
    run_state_machine_as_test(machine, settings=chosen)
    assert {module.name for module in modules} == {"fa2"}


@pytest.mark.parametrize("window", [None, 3])
def test_a_tree_attends_as_it_does_with_the_reference_kernels(window: int | None, modules: list[Any]) -> None:
    layer = LayerSpec(4, 2, 64, 64, 0.3, sliding_window=window, softcap=4.0)
    kernels = (CpuKernels(), ReferenceKernels((64,)))
    outs = [tree_attention(one, replace(SPEC, layers=(layer,)), page_size=3) for one in kernels]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)


def test_a_recorded_kernel_is_first_planned_at_its_largest(modules: list[Any]) -> None:
    made = backend(capture=rerun, max_graph_tokens=12)
    made.allocate(SPEC)
    step(made, 9)
    largest, real = [module.plans[0] for module in modules if module.plans][-2:]
    assert (largest[6], real[6]) == (10, 10), "FlashInfer keeps the first plan's number of queries as the limit"
    assert (largest[3].tolist(), real[3].tolist()) == ([0, 7, 8, 9, 10], [0, 9, 9, 9, 9])
    assert all(plan[11] for plan in (largest, real)), "graph mode"


def test_a_plan_waits_for_the_one_before_to_be_fetched(events: Any) -> None:
    made = backend()
    made.allocate(SPEC)  # plans once, to compile
    for number in range(3):
        step(made, 5, str(number))
        assert events.waited == events.recorded[:-1]


def test_what_the_compiler_says_is_told_with_what_to_check(modules: list[Any], use_module: Callable[..., None]) -> None:
    def failing(*arguments: Any) -> None:
        raise RuntimeError(
            "Ninja build failed. Ninja output:\nx.cu: fatal error: cuda_runtime.h: No such file\nstopped"
        )

    use_module(failing)
    with pytest.raises(PluginError, match=r"compile.*heads of 64 elements.*fatal error: cuda_runtime\.h.*CUDA_HOME"):
        backend().allocate(SPEC)


@pytest.mark.parametrize("error", [RuntimeError("Buffer overflow in AlignedAllocator"), OSError("no such file")])
def test_no_other_failure_is_called_one_of_the_compiler(
    error: Exception, modules: list[Any], use_module: Callable[..., None]
) -> None:
    def failing(*arguments: Any) -> None:
        raise error

    use_module(failing)
    with pytest.raises(type(error)) as raised:
        backend().allocate(SPEC)
    assert raised.value is error
