"""Recordings of passes: how a CUDA graph is made, what it holds, and the steps without one."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emssd_flashinfer.recorded import CudaGraphCapture
from emssd_testing.drafters import RandomDrafter
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference

from emssd.cli.turns import Turns
from emssd.decoding.engine import Engine
from emssd.errors import PluginError
from emssd.sampling import SamplingParams
from emssd.sequences import Request
from plugins.flashinfer.tests.test_compiled import PROMPTS, history, model_of, runner_of, traced
from tests.support.reference_kernels import rerun


class FakeCuda:
    """The part of `torch.cuda` that recording touches. It notes all calls in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.log: list[str] = []
        self.sides: list[SimpleNamespace] = []
        self.error = error
        for name in ("CUDAGraph", "Stream", "current_stream", "graph", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name}"))

    def _current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: self.log.append("main waits"))

    def _Stream(self) -> SimpleNamespace:
        self.sides.append(SimpleNamespace(wait_stream=lambda other: self.log.append("side waits")))
        return self.sides[-1]

    def _CUDAGraph(self) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: self.log.append("replay"), pool=lambda: (1, 2))

    @contextmanager
    def _stream(self, stream: object) -> Iterator[None]:
        self.log.append("on side")
        yield

    @contextmanager
    def _graph(self, graph: object, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "what other threads allocate ends the recording"
        assert stream is self.sides[-1], "a stream that has not been warmed up"
        assert not gc.isenabled(), "what is freed meanwhile can break the recording"
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
        assert len(cuda.sides) == 1, "cuBLAS keeps a workspace for each stream"
        assert gc.isenabled()

    def test_garbage_collection_stays_off_where_it_was(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeCuda(monkeypatch)
        gc.disable()
        try:
            CudaGraphCapture()(lambda: torch.zeros(1))
            assert not gc.isenabled()
        finally:
            gc.enable()

    @pytest.mark.parametrize(
        ("error", "kind", "message"),
        [
            (
                RuntimeError("operation not permitted\nmore"),
                PluginError,
                r"not permitted\. Set backend\.cuda_graphs=false",
            ),
            (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "CUDA out of memory"),
        ],
    )
    def test_a_model_that_cannot_be_recorded_is_told_with_the_option_and_no_memory_is_not_its_fault(
        self, error: Exception, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        FakeCuda(monkeypatch, error)
        with pytest.raises(kind, match=message):
            CudaGraphCapture()(lambda: torch.zeros(1))
        assert gc.isenabled()


def test_a_pass_stays_as_long_as_its_recording() -> None:
    """A CUDA graph holds addresses, and no tensor."""
    passes = list[weakref.ref[Any]]()

    def graph_of(compute: Any) -> Any:
        passes.append(weakref.ref(compute))
        return rerun(weakref.proxy(compute))

    runner = runner_of(model_of(), traced, graph_of)
    Engine(runner, RandomDrafter(runner.vocab_size, 3, {}, seed=1), batch_size=3).generate([[1, 5]], 3)
    assert passes
    assert all(held() is not None for held in passes)
    runner.backend.forget_steps()
    assert all(held() is None for held in passes)


@pytest.mark.parametrize(
    ("failing", "warning"),
    [("all", "here on, steps run without"), ("one size", "here on, steps of 4 tokens run without"), ("once", "")],
)
def test_a_step_that_cannot_be_recorded_twice_runs_without_a_graph(failing: str, warning: str) -> None:
    """The others are recorded, if any has been."""
    attempts = Counter[int]()

    def capture(compute: Any) -> Any:
        attempts[size := len(compute().logits)] += 1
        if failing == "all" or (size == 4 and (failing == "one size" or attempts[size] == 1)):
            raise PluginError("backend 'flashinfer' cannot record this")
        return compute

    model = model_of()
    runner: Any = runner_of(model, None, capture)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits = history(runner, 6)
    assert all(map(torch.equal, history(runner_of(model, None), 6), logits))
    assert [warning in str(one.message) for one in caught] == [True] * bool(warning)
    assert attempts.total() == 2 if failing == "all" else attempts[4] == 2
    assert bool(runner.backend._kernels.recorded_sizes) == (len(attempts) > 3) == (failing != "all")


@pytest.mark.parametrize("sampling", [None, SamplingParams(temperature=0.8, seed=1)], ids=["greedy", "sampled"])
def test_an_untimed_start_records_chains_of_all_sizes_the_largest_first(sampling: SamplingParams | None) -> None:
    sizes = list[int]()

    def capture(compute: Any) -> Any:
        sizes.append(len(compute().logits))
        return compute

    runner = runner_of(model_of(), None, capture, frozen=True)
    engine = Engine(runner, RandomDrafter(runner.vocab_size, 3, {}, seed=1), batch_size=3)
    requests = [Request(str(row), (1 + row, 2), 9, sampling=sampling) for row in range(3)]
    list(Turns([engine], requests).run())
    assert sizes[:10] == [12, 10, *range(8, 0, -1)]
    assert min(sizes[10:], default=16) > 12, "only with prompts there are larger steps"


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "lfm2"])
def test_a_model_that_keeps_states_is_not_recorded(architecture: str) -> None:
    """A recording would read the states of the rows that it was made with."""
    model = tiny_model(architecture, dtype=torch.float64)
    expected = [greedy_reference(model, prompt, 6) for prompt in PROMPTS]
    runner = runner_of(model, traced)
    assert runner._states is not None
    engine = Engine(runner, RandomDrafter(runner.vocab_size, 3, {}, seed=1), batch_size=3)
    done = engine.generate(PROMPTS, 6, ignore_eos=True)
    assert [list(row.token_ids) for row in done] == expected
