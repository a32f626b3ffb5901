"""Recorded steps of planned kernels: the ladder, the static tensors, the recording itself, and right replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emssd_flashinfer.graphs import CudaGraphCapture
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import KVCacheSpec, LayerSpec, PackedInputs, PagedBackend
from emssd.attention.recorded import Compute, StaticInputs, ladder, rung
from emssd.decoding.engine import Engine
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.errors import PluginError
from emssd.model import CausalLMRunner, TargetModel
from emssd.sequences import Request, Sequence
from emssd.testing.drafters import RandomDrafter
from emssd.testing.models import tiny_model
from emssd.testing.oracle import greedy_reference
from emssd.testing.paged import ReferenceKernels, rerun

CPU = torch.device("cpu")
LAYER = LayerSpec(num_qo_heads=4, num_kv_heads=2, key_dim=10, value_dim=7, scale=0.3)
SPEC = KVCacheSpec((LAYER, replace(LAYER, sliding_window=4)), torch.float64, CPU, max_batch_size=4, max_model_len=64)


def allocated(**options: Any) -> PagedBackend:
    backend = PagedBackend(ReferenceKernels(**options), memory_fraction=1.0)
    assert not backend.unsupported(SPEC)
    backend.allocate(SPEC)
    return backend


def sequence(name: str, length: int, num_cached: int = 0) -> Sequence:
    return Sequence(Request(name, tuple(range(1, length + 1)), 100), num_cached=num_cached)


class TestLadder:
    @given(max_tokens=st.integers(1, 3000), num_tokens=st.integers(1, 3000))
    def test_padding_stays_below_a_quarter_and_larger_steps_have_no_rung(
        self, max_tokens: int, num_tokens: int
    ) -> None:
        sizes = ladder(max_tokens)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] <= max_tokens
        size = rung(sizes, num_tokens)
        if size is None:
            assert num_tokens > sizes[-1]
        else:
            assert num_tokens <= size < 1.25 * num_tokens
            assert all(other < num_tokens for other in sizes if other < size)

    def test_it_reaches_its_end_and_stays_short(self) -> None:
        assert ladder(512)[-1] == 512
        assert len(ladder(512)) == 8 + 4 * 6


class TestStaticInputs:
    @given(history=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=5))
    def test_each_step_leaves_nothing_of_the_one_before(self, history: list[tuple[int, int]]) -> None:
        static = StaticInputs(16, CPU)
        addresses = [tensor.data_ptr() for tensor in (static.input_ids, static.slots)]
        for num_tokens, padding in history:
            packed = pack([sequence("a", num_tokens)], Draft.empty(1))
            slots, scrap = torch.arange(100, 100 + num_tokens), torch.full((padding,), 7)
            static.fill(packed, slots, scrap)
            size = num_tokens + padding
            assert static.input_ids[:size].tolist() == packed.input_ids.tolist() + [0] * padding
            assert static.position_ids[:size].tolist() == [*range(num_tokens), *[0] * padding]
            assert static.slots[:size].tolist() == slots.tolist() + [7] * padding
            assert static.logit_rows[:size].tolist() == [num_tokens - 1] + [0] * (size - 1)
        assert addresses == [tensor.data_ptr() for tensor in (static.input_ids, static.slots)]


class Counting:
    """Records like `rerun` and counts."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, compute: Compute) -> Compute:
        self.recorded += 1

        def replay() -> torch.Tensor:
            self.replayed += 1
            return compute()

        return replay


@pytest.mark.parametrize("architecture", ["opt", "llama", "gemma2"])
def test_recorded_steps_generate_what_greedy_decoding_does(architecture: str) -> None:
    model = tiny_model(architecture, max_model_len=64)
    target = TargetModel(model)
    prompts = [[1, 5, 6, 7, 5], [9], [3] * 20, [8, 2, 8], [4, 4]]
    expected = {str(i): greedy_reference(model, prompt, 12) for i, prompt in enumerate(prompts)}
    capture = Counting()
    backend = PagedBackend(ReferenceKernels(capture=capture, max_graph_tokens=16), page_size=4, memory_fraction=1.0)
    backend.allocate(target.kv_cache_spec(3))
    engine = Engine(
        CausalLMRunner(target, backend), RandomDrafter(target.vocab_size, 4, expected, seed=1), batch_size=3
    )
    outputs = engine.generate(prompts, 12, ignore_eos=True)
    assert [list(output.token_ids) for output in outputs] == list(expected.values())
    assert 0 < capture.recorded <= len(ladder(16))
    assert capture.replayed > capture.recorded, "nothing was replayed, so this proves nothing"
    assert capture.replayed < engine.report.num_steps, "the prompts' step is too large to be replayed"
    assert engine.report.input_padding > 0


def test_padding_of_a_recorded_step_is_counted_and_harms_nobody() -> None:
    backend, plain = allocated(capture=rerun, max_graph_tokens=12), allocated()
    packed = pack([sequence("a", 7), sequence("b", 2)], Draft.empty(2))
    plan = backend.plan(packed)
    assert plan.input_ids.shape == (1, 10)  # 9 tokens in a recording of 10
    assert plain.plan(packed).input_ids.shape == (1, 9)


@pytest.mark.parametrize("length", [9, 10, 13], ids=["padded", "full", "not recorded"])
def test_no_output_shows_memory_that_nobody_wrote(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = allocated(capture=rerun, max_graph_tokens=12)
    plan = backend.plan(pack([sequence("a", length)], Draft.empty(1)))
    count = plan.input_ids.numel()
    query, key, value = (
        torch.ones(count, heads, dim, dtype=torch.float64) for heads, dim in ((4, 10), (2, 10), (2, 7))
    )
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, shape: torch.full(shape, torch.nan, dtype=self.dtype))
    assert backend.forward(plan, 0, query, key, value).isfinite().all()


def test_padding_gets_nothing_of_a_larger_step_before_that_was_not_finite() -> None:
    backend = allocated(capture=rerun, max_graph_tokens=12)
    for name, length, filling in (("bad", 10, torch.nan), ("good", 9, 1.0)):
        plan = backend.plan(pack([sequence(name, length)], Draft.empty(1)))
        query, key, value = (
            torch.full((10, heads, dim), filling, dtype=torch.float64) for heads, dim in ((4, 10), (2, 10), (2, 7))
        )
        out = backend.forward(plan, 0, query, key, value)
        backend.release([name])
    assert out.isfinite().all()


def test_a_step_beyond_the_ladder_runs_as_it_is() -> None:
    backend = allocated(capture=rerun, max_graph_tokens=12)
    plan = backend.plan(pack([sequence("a", 13)], Draft.empty(1)))
    assert plan.replay is None
    assert plan.input_ids.shape == (1, 13)


def test_a_recorded_step_reads_no_tensor_of_its_packed_inputs() -> None:
    """What a replay reads must be the static tensors: here the packed ones are spoilt after planning."""
    backend = allocated(capture=rerun, max_graph_tokens=12)
    packed: PackedInputs = pack([sequence("a", 3)], Draft.empty(1))
    plan = backend.plan(packed)
    wanted = [tensor.clone() for tensor in (plan.input_ids, plan.position_ids, plan.logits_to_keep)]
    for tensor in (packed.input_ids, packed.position_ids, packed.logit_rows):
        tensor.fill_(11)
    assert all(map(torch.equal, wanted, (plan.input_ids, plan.position_ids, plan.logits_to_keep)))


class FakeCuda:
    """As much of `torch.cuda` as recording touches, noting what happens in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.log: list[str] = []
        self.error = error
        for name in ("CUDAGraph", "Stream", "current_stream", "graph", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name}"))

    def _current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: self.log.append("main waits"))

    def _Stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: self.log.append("side waits"))

    def _CUDAGraph(self) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: self.log.append("replay"), pool=lambda: (1, 2))

    @contextmanager
    def _stream(self, stream: object) -> Iterator[None]:
        self.log.append("on side")
        yield

    @contextmanager
    def _graph(self, graph: object, pool: object) -> Iterator[None]:
        self.log.append(f"recording into {pool}")
        if self.error is not None:
            raise self.error
        yield


class TestCudaGraphCapture:
    def test_it_warms_up_aside_records_once_and_replays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda, capture = FakeCuda(monkeypatch), CudaGraphCapture()
        result = torch.zeros(1)

        def compute() -> torch.Tensor:
            cuda.log.append("compute")
            return result

        for pool in (None, (1, 2)):  # the second graph shares the memory of the first
            cuda.log.clear()
            replay = capture(compute)
            assert cuda.log == [
                "side waits", "on side", "compute", "compute", "main waits", f"recording into {pool}", "compute",
            ]  # fmt: skip
            cuda.log.clear()
            assert replay() is replay() is result
            assert cuda.log == ["replay", "replay"]

    def test_a_model_that_cannot_be_recorded_is_told_with_the_option(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeCuda(monkeypatch, RuntimeError("operation not permitted when stream is capturing\nmore"))
        with pytest.raises(
            PluginError, match=r"not permitted when stream is capturing\. Set backend\.cuda_graphs=false"
        ):
            CudaGraphCapture()(lambda: torch.zeros(1))

    def test_no_memory_is_no_fault_of_the_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeCuda(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
        with pytest.raises(torch.OutOfMemoryError):
            CudaGraphCapture()(lambda: torch.zeros(1))
