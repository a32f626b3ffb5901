"""Every backend that runs without a GPU, under the name that tests are drawn by."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from emssd_padded import PaddedConfig
from emssd_padded.backend import PaddedBackend
from emssd_ragged import Kernels, RaggedConfig
from emssd_ragged.backend import ragged_backend
from emssd_testing.oracle import DenseBackend

from emssd.attention import AttentionBackend, PagedBackend
from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.scheduler import ContinuousScheduler, StaticScheduler
from emssd.drafting import BudgetPolicy, Drafter, DrafterContext
from emssd.hooks.registry import Registry
from emssd.model import BorrowedTarget, CausalLMRunner, TargetModel
from tests.support.reference_kernels import ReferenceKernels, rerun

MakeBackend = Callable[[], AttentionBackend]

BACKENDS: dict[str, MakeBackend] = {
    "ragged-page-1": lambda: ragged_backend(page_size=1),
    "ragged-page-3": lambda: ragged_backend(page_size=3),
    "ragged-page-16": lambda: ragged_backend(page_size=16, kernels="torch"),
    "ragged-fused": lambda: ragged_backend(kernels="fused"),
    "padded": lambda: PaddedBackend(pad_kv=True, pad_inputs=True),
    "unpad_inputs": lambda: PaddedBackend(pad_kv=True, pad_inputs=False),
    "unpad_kv": lambda: PaddedBackend(pad_kv=False, pad_inputs=True),
    "unpad_both": lambda: PaddedBackend(pad_kv=False, pad_inputs=False),
    "paged-grows": lambda: PagedBackend(ReferenceKernels(), page_size=2),
    "paged-page-1": lambda: PagedBackend(ReferenceKernels(), page_size=1, memory_fraction=1.0),
    "paged-page-4": lambda: PagedBackend(ReferenceKernels(), page_size=4, memory_fraction=1.0),
    "paged-page-16": lambda: PagedBackend(ReferenceKernels(), page_size=16, memory_fraction=1.0),
    "paged-recorded": lambda: PagedBackend(
        ReferenceKernels(capture=rerun, max_graph_tokens=12), page_size=3, memory_fraction=1.0
    ),
    "dense": DenseBackend,
}

PADDED_CONFIGS: dict[str, Any] = {
    "padded": PaddedConfig(),
    "unpad_kv": PaddedConfig(pad_kv=False),
    "unpad_inputs": PaddedConfig(pad_inputs=False),
    "unpad_both": PaddedConfig(pad_kv=False, pad_inputs=False),
}
CONFIGS: dict[str, Any] = {
    "fused": RaggedConfig(kernels=Kernels.fused),
    "torch": RaggedConfig(kernels=Kernels.torch),
    "page 1": RaggedConfig(page_size=1, kernels=Kernels.torch),
    "page 3": RaggedConfig(page_size=3, kernels=Kernels.torch),
    **PADDED_CONFIGS,
}
"""Options of backends, as a user has them."""


def chosen(*left_out: str) -> dict[str, MakeBackend]:
    """All of them but those `left_out`."""
    assert set(left_out) <= set(BACKENDS)
    return {name: make for name, make in BACKENDS.items() if name not in left_out}


def runner_of(target: TargetModel, backend: AttentionBackend, batch_size: int = 3, **spec: Any) -> CausalLMRunner:
    """A runner whose backend is allocated for so many rows; `spec` has what else its cache must serve."""
    backend.allocate(replace(target.kv_cache_spec(batch_size), **spec))
    return CausalLMRunner(target, backend)


def engine_of(
    target: TargetModel,
    drafter: Drafter | Seq[Drafter],
    backend: AttentionBackend,
    batch_size: int = 3,
    *,
    max_step_tokens: int = 64,
    static: bool = False,
    headroom: int = 0,
    budget: BudgetPolicy | None = None,
    **spec: Any,
) -> Engine:
    """An engine that raises what drafters raise. Its batches are static if they must be, for the backend's sake too."""
    spec.setdefault("trees", any(one.drafts_trees for one in ([drafter] if isinstance(drafter, Drafter) else drafter)))
    static = static or bool(backend.unsupported(replace(target.kv_cache_spec(batch_size), continuous=True, **spec)))
    continuous = ContinuousScheduler(batch_size, max_step_tokens, headroom=headroom)
    scheduler = StaticScheduler(batch_size) if static else continuous
    runner = runner_of(target, backend, batch_size, continuous=not static, **spec)
    return Engine(runner, drafter, scheduler=scheduler, budget=budget, on_drafter_error="fail")


def context_of(target: TargetModel, backend: Any = "ragged", batch_size: int = 3, **spec: Any) -> DrafterContext:
    """The context of a drafter that borrows from `target`, has KV caches of its own, and asks for no other drafter."""
    return DrafterContext(
        target.vocab_size,
        None,
        lambda path, trees=False: pytest.fail("asks for no model"),
        lambda name, values: pytest.fail("asks for no other"),
        "fail",
        BorrowedTarget(target),
        replace(target.kv_cache_spec(batch_size), **spec),
        lambda cache_spec: make_backend(cache_spec, backend, Registry()),
    )
