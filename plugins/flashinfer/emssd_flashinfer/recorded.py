"""Steps of a few fixed sizes. Their forward passes can be recorded once and replayed, for example as CUDA graphs."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from emssd.attention import PackedInputs
from emssd.errors import PluginError
from emssd_flashinfer.tables import FixedShape, PagedMetadata, StepPages

__all__ = ["Capture", "Compute", "CudaGraphCapture", "Staging", "StaticInputs", "ladder", "rung"]

Compute = Callable[[], Any]
"""A pass, which returns tensors."""

Capture = Callable[[Compute], Compute]
"""Records a pass: what it returns runs the pass again, on what its tensors hold by then."""

T = TypeVar("T")


def ladder(max_tokens: int) -> tuple[int, ...]:
    """Token counts to record: all up to 8, then four in each doubling. So padding stays below a quarter."""
    sizes = list(range(1, 9))
    step = 2
    while sizes[-1] < max_tokens:
        last = sizes[-1]
        sizes.extend(last + step * i for i in range(1, 5))
        step *= 2
    return tuple(size for size in sizes if size <= max_tokens)


def rung(sizes: tuple[int, ...], num_tokens: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `num_tokens`; ``None`` if none does."""
    index = bisect_left(sizes, num_tokens)
    return sizes[index] if index < len(sizes) else None


class StepTables(NamedTuple, Generic[T]):
    """The inputs of a recorded pass, on the device or as written on the host.

    Attributes:
        input_ids, position_ids, slots, logit_rows: ``[num_tokens]`` int64.
        places: ``[num_tokens]`` int64, see `emssd.attention.packed.Drafted`.
        qo_indptr, kv_indptr: ``[num_rows + 1]`` int32, as `kv_last_page_len` ``[num_rows]`` and `kv_indices`
            ``[num_pages]`` in the layout of `emssd_flashinfer.tables.PagedMetadata`.
    """

    input_ids: T
    position_ids: T
    slots: T
    logit_rows: T
    places: T
    qo_indptr: T
    kv_indptr: T
    kv_last_page_len: T
    kv_indices: T


class Staging:
    """Memory of a device that is filled anew in each step, in one copy from pinned memory of the host.

    There are two buffers on the host, which take turns. So a step is written while the one before is still read.
    `make_event` makes events, by which the host knows how far the device is; on a GPU ``torch.cuda.Event``.
    """

    def __init__(self, num_bytes: int, device: torch.device, make_event: Callable[[], Any] | None = None) -> None:
        on_gpu = device.type == "cuda"
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.buffers = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        make_event = make_event or (torch.cuda.Event if on_gpu else None)
        self._read = [] if make_event is None else [make_event() for _ in self.buffers]
        self._turn = 0
        self._parts: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by turn and size: to, from

    def next(self) -> int:
        """Return the buffer to write, the other one. The host waits until nobody reads it any more."""
        self._turn = 1 - self._turn
        if self._read and not self._read[self._turn].query():
            self._read[self._turn].synchronize()
        return self._turn

    def move(self, num_bytes: int) -> None:
        """Copy the beginning of the buffer that is being written to the device, in units of 256 bytes."""
        key = self._turn, -(-num_bytes // _MOVED)
        if key not in self._parts:
            self._parts[key] = self.memory[: key[1] * _MOVED], self.buffers[self._turn][: key[1] * _MOVED]
        to, source = self._parts[key]
        to.copy_(source, non_blocking=True)

    def done(self) -> None:
        """Note that later launches do not read the buffer that was written."""
        if self._read:
            self._read[self._turn].record()


class StaticInputs:
    """The tensors that the recorded passes of one size read. Each step fills them anew; their addresses never change.

    The `tables` are on the device, and so is `fed`: ``[1, num_tokens]`` token ids and positions, as a model reads them.
    """

    def __init__(self, shape: FixedShape, staging: Staging) -> None:
        self.shape, self._staging = shape, staging
        self.tables = _tables(staging.memory, shape)
        self.fed = self.tables.input_ids.unsqueeze(0), self.tables.position_ids.unsqueeze(0)
        self._hosts = [_tables(buffer, shape) for buffer in staging.buffers]
        self._arrays = [StepTables(*(table.numpy() for table in host)) for host in self._hosts]
        self._pages_begin = _sections(shape)[-1][0]

    @staticmethod
    def num_bytes(shape: FixedShape) -> int:
        """Of staging memory that tensors of this shape take."""
        return _sections(shape)[-1][1]

    def fill(self, packed: PackedInputs, pages: StepPages, scrap_slots: NDArray[np.int64]) -> PagedMetadata:
        """Write one step. A padding token is token 0 at position 0, and its KV goes to one of `scrap_slots`.

        The result has absent rows, without query and page, up to the rows of the shape. `kv_indices` and `slots` are on
        the device; the others are on the host, and may be read until `done`.
        """
        assert packed.num_rows <= self.shape.num_rows, f"{packed.num_rows} rows in a recording of {self.shape.num_rows}"
        turn = self._staging.next()
        arrays, num_pages = self._arrays[turn], len(pages.kv_indices)
        _write(arrays.input_ids, packed.input_ids.numpy(), 0)
        _write(arrays.position_ids, packed.position_ids.numpy(), 0)
        _write(arrays.logit_rows, packed.logit_rows.numpy(), 0)
        _write(arrays.slots, pages.slots, scrap_slots[: self.shape.num_tokens - packed.num_tokens])
        _write(arrays.qo_indptr, pages.qo_indptr, packed.num_tokens)
        _write(arrays.kv_indptr, pages.kv_indptr, num_pages)
        _write(arrays.kv_last_page_len, pages.kv_last_page_len, 0)
        arrays.kv_indices[:num_pages] = pages.kv_indices
        if packed.drafted is not None:
            _write(arrays.places, packed.drafted.places.numpy(), 0)
        self._staging.move(self._pages_begin + _INT32 * num_pages)
        if packed.drafted is not None:
            index = self.tables.places[: len(packed.drafted.places)]
            self.tables.input_ids.index_copy_(0, index, packed.drafted.token_ids)
        host = self._hosts[turn]
        return PagedMetadata(
            qo_indptr=host.qo_indptr,
            kv_indptr=host.kv_indptr,
            kv_indices=self.tables.kv_indices[:num_pages],
            kv_last_page_len=host.kv_last_page_len,
            slots=self.tables.slots,
            page_size=pages.page_size,
        )

    def done(self) -> None:
        """Note that later launches read no table of the host."""
        self._staging.done()


_INT32, _ALIGNMENT, _MOVED = 4, 64, 256  # bytes


def _sections(shape: FixedShape) -> list[tuple[int, int, torch.dtype]]:
    """The first byte and the last of each of the `StepTables`, and its type. The pages come last, as few are used."""
    tokens, rows = (shape.num_tokens, torch.int64), (shape.num_rows + 1, torch.int32)
    shapes = [*[tokens] * 5, rows, rows, (shape.num_rows, torch.int32), (shape.num_pages, torch.int32)]
    sections, begin = [], 0
    for count, dtype in shapes:
        end = begin + count * dtype.itemsize
        sections.append((begin, end, dtype))
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
    return sections


def _tables(memory: torch.Tensor, shape: FixedShape) -> StepTables[torch.Tensor]:
    return StepTables(*(memory[begin:end].view(dtype) for begin, end, dtype in _sections(shape)))


def _write(array: NDArray[Any], values: NDArray[Any], rest: int | NDArray[np.int64]) -> None:
    array[: len(values)] = values
    if len(values) < len(array):
        array[len(values) :] = rest


class CudaGraphCapture:
    """A `Capture`. Its graphs share one memory pool and must not run at the same time.

    All are recorded on one stream, as cuBLAS keeps a workspace for each stream that it has seen. Other threads may
    allocate on the device meanwhile.
    """

    _WARM_UPS = 2  # passes that compile, tune and allocate what must not be allocated while recording
    _pool: Any = None
    _side: Any = None

    def __call__(self, compute: Compute) -> Compute:
        main = torch.cuda.current_stream()
        if self._side is None:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
            gc.collect()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            for _ in range(self._WARM_UPS):
                compute()
        main.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local")
        was_enabled = gc.isenabled()
        gc.disable()  # to free another graph, say, can break the recording of one
        try:
            with recording:
                result = compute()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PluginError(
                f"backend 'flashinfer' cannot record this model's forward pass as a CUDA graph: "
                f"{str(error).splitlines()[0].rstrip('.')}. Set backend.cuda_graphs=false"
            ) from error
        finally:
            if was_enabled:
                gc.enable()
        self._pool = graph.pool()

        def replay() -> Any:
            graph.replay()
            return result

        return replay
