"""Paged kernels that are planned from page tables once a step, as FlashInfer's are; small steps can be recorded."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from operator import add
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from emssd.attention import (
    KVCacheSpec,
    KVPool,
    LayerSpec,
    PackedInputs,
    PagedKernels,
    PageShapes,
    PageTable,
    StepPlan,
    on_device,
)
from emssd.errors import PluginError
from emssd.model import CompiledPasses
from emssd_flashinfer.recorded import Capture, Compute, Staging, StaticInputs, ladder, rung
from emssd_flashinfer.tables import FixedShape, PagedMetadata, StepPages, TreeMask, step_pages, tree_mask

__all__ = ["PagedAttention", "PlannedKernels"]


class PagedAttention(Protocol):
    """Attention by the rules of one layer: planned once a step, run for each layer that has these rules."""

    def plan(self, metadata: PagedMetadata, mask: TreeMask | None = None) -> None:
        """Prepare a step.

        Attention is causal, within the layer's window if it has one. A mask replaces both rules; a recorded step has
        absent rows after those of the mask. An attention of a fixed shape takes metadata with exactly that number of
        rows.
        """

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """Attend. Queries beyond the planned ones leave their rows of `out` as they are.

        Args:
            query: ``[n, num_qo_heads, dim]``, ``n >= nnz``.
            keys, values: ``[pages, page_size, num_kv_heads, dim]``, with the new tokens in their slots.
            out: ``[n, num_qo_heads, dim]``, written.
        """


@dataclass(slots=True)
class PlannedStep:
    """The inputs of `PlannedKernels.forward`.

    Attributes:
        slots: ``[n]`` int64, where the new KV goes.
        attention: by layer rules, planned for this step.
        outputs: ``[max_tokens, heads, dim]`` by layer rules, which a recorded step writes; ``None`` in other steps.
    """

    slots: torch.Tensor
    attention: dict[LayerSpec, PagedAttention]
    outputs: dict[LayerSpec, torch.Tensor] | None = None


class PlannedKernels(PagedKernels):
    """Pages ``[page_size, num_kv_heads, dim]``; inputs are padded in recorded steps only.

    The kernels take heads of `head_dims` elements, ascending. Other heads are padded with zeros to the next. `capture`
    records the forward passes of steps of up to `max_graph_tokens`. It needs a pool of a fixed size, as a recording
    reads fixed addresses. `passes` compiles what is recorded.
    """

    takes_trees = True

    def __init__(
        self,
        head_dims: tuple[int, ...],
        capture: Capture | None = None,
        max_graph_tokens: int = 512,
        passes: CompiledPasses | None = None,
    ) -> None:
        self._head_dims = head_dims
        self._capture, self._compiled = capture, passes
        self.recorded_sizes = ladder(max_graph_tokens) if capture is not None else ()
        self._attention: dict[tuple[int | None, bool, int], dict[LayerSpec, PagedAttention]] = {}
        self._static: dict[tuple[int, int], StaticInputs] = {}
        self._recordings: dict[Hashable, tuple[Compute, Compute]] = {}  # and passes, which hold what these read
        self._num_failed = Counter[Hashable]()  # attempts to record
        self._landings: dict[int, torch.Tensor] = {}  # by size, where greedy tokens arrive
        self._passes: list[Staging] = []  # of the passes that are planned together, each

    @abstractmethod
    def attention(
        self, layer: LayerSpec, *, masked: bool = False, static: StaticInputs | None = None
    ) -> PagedAttention:
        """Attention by the rules of `layer`, whose heads are padded already and whose scale is the true one.

        If `masked`, it is always planned with a mask. If it is to be recorded, `static` has what it reads.
        """

    def forget_steps(self) -> None:
        self._recordings.clear()
        if self._compiled is not None:
            self._compiled.forget()

    def num_rows(self, size: int) -> int:
        """Rows of a recording of `size` tokens. Every row has a token, so no step has more rows than tokens."""
        return min(self._spec.max_batch_size, size)

    def unsupported(self, spec: KVCacheSpec, page_size: int) -> list[str]:
        reasons, largest = [], self._head_dims[-1]
        dims = [max(layer.key_dim, layer.value_dim) for layer in spec.layers]
        if max(dims) > largest:
            index = dims.index(max(dims))
            reasons.append(f"it takes heads of up to {largest} elements, and layer {index} has {dims[index]}")
        for index, layer in enumerate(spec.layers):
            if layer.num_qo_heads % layer.num_kv_heads:
                reasons.append(
                    f"layer {index} has {layer.num_qo_heads} query heads over {layer.num_kv_heads} key heads, and "
                    f"query heads must be a multiple of key heads"
                )
                break
        return reasons

    def page_shapes(self, layer: LayerSpec, dtype: torch.dtype, page_size: int) -> PageShapes:
        page = (page_size, layer.num_kv_heads, padded_layer(layer, self._head_dims).key_dim)
        return page, page

    def allocate(self, spec: KVCacheSpec, pool: KVPool) -> None:
        self._spec, self._pool = spec, pool
        self._layers = tuple(padded_layer(layer, self._head_dims) for layer in spec.layers)
        self._rules = tuple(dict.fromkeys(self._layers))
        if self.recorded_sizes:
            most = self.recorded_sizes[-1]
            self._outputs = {
                layer: torch.zeros(most, layer.num_qo_heads, layer.value_dim, dtype=spec.dtype, device=spec.device)
                for layer in self._rules
            }
            self._pass_outputs = {layer: torch.zeros_like(out) for layer, out in self._outputs.items()}

    def prepare(self) -> None:
        assert self._capture is None or self._pool.num_pages, "recorded steps need a pool of a fixed size"
        if self.recorded_sizes:
            num_bytes = max(StaticInputs.num_bytes(self._shape(size)) for size in self.recorded_sizes)
            self._staging = Staging(num_bytes, self._spec.device)
            # The last page belongs to no sequence: there goes the KV of padding.
            scrap = (self._pool.num_pages - 1) * self._pool.page_size
            self._scrap_slots = scrap + np.arange(self.recorded_sizes[-1]) % self._pool.page_size
        self._attention_of(None, False)  # so that kernels which cannot be made are known before the first step

    def plan(self, packed: PackedInputs, table: PageTable) -> StepPlan:
        masked, size = packed.trees is not None, self._size_of(packed)
        if size is not None:
            return self._recorded_plan(packed, step_pages(table, packed), size, masked)
        attention, metadata = self._attention_of(None, masked), step_pages(table, packed).metadata()
        _plan(attention, packed, metadata)
        step = PlannedStep(on_device(metadata.slots, self._spec.device), attention)
        return StepPlan.ragged(packed.on(self._spec.device), step)

    def plan_chain(self, packed: PackedInputs, lengths: Seq[int], table: PageTable) -> list[StepPlan]:
        size, num_passes = rung(self.recorded_sizes, packed.num_tokens), max(lengths)
        if size is None:
            return []
        while len(self._passes) < num_passes:
            self._passes.append(Staging(len(self._staging.memory), self._spec.device))
        plans = list[StepPlan]()
        for number in range(num_passes):
            later = [min(number, length - 1) for length in lengths]
            kv_lens = tuple(map(add, packed.kv_lens, later))
            step = packed._replace(kv_lens=kv_lens, position_ids=torch.tensor(kv_lens) - 1)
            step = step._replace(drafted=None) if number else step
            pages = step_pages(table, step)
            ended = [row for row, length in enumerate(lengths) if number >= length]
            pages.slots[ended] = self._scrap_slots[: len(ended)]
            plans.append(self._recorded_plan(step, pages, size, False, number, num_passes))
        return plans

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        step: PlannedStep = plan.attention
        rules, spec = self._layers[layer], self._spec.layers[layer]
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        write_kv(keys, values, step.slots, key, value)
        if rules.key_dim > spec.key_dim:
            query = F.pad(query, (0, rules.key_dim - spec.key_dim))
        out = query.new_empty(query.shape) if step.outputs is None else step.outputs[rules][: len(query)]
        step.attention[rules].run(query, keys, values, out)
        return out[..., : spec.value_dim]

    def _size_of(self, packed: PackedInputs) -> int | None:
        """The size of the recording that serves a step; ``None`` if the step runs as it is."""
        size = rung(self.recorded_sizes, packed.num_tokens)
        if size is None or packed.trees is None:
            return size
        fits = self._spec.trees and max(packed.kv_lens) <= self._static_of(size).shape.max_kv_len
        return size if fits else None

    def _attention_of(self, size: int | None, masked: bool, number: int = -1) -> dict[LayerSpec, PagedAttention]:
        """By layer rules: eager, or of a recorded size, and of a pass of several. It is made when first asked for."""
        key = size, masked, number
        if key not in self._attention:
            static = None if size is None else self._static_of(size, number)
            self._attention[key] = {rule: self.attention(rule, masked=masked, static=static) for rule in self._rules}
        return self._attention[key]

    def _static_of(self, size: int, number: int = -1) -> StaticInputs:
        key = size, number
        if key not in self._static:
            staging = self._staging if number < 0 else self._passes[number]
            self._static[key] = StaticInputs(self._shape(size), staging)
        return self._static[key]

    def _shape(self, size: int) -> FixedShape:
        num_rows, page_size = self.num_rows(size), self._pool.page_size
        largest = num_rows + (size - num_rows) // page_size  # pages of `largest_metadata`
        max_kv_len = self._spec.max_model_len + self.recorded_sizes[-1]
        if self._spec.prefix_caching:  # a page is listed once for each row that shares it
            largest = max(largest, num_rows * -(-max_kv_len // page_size))
        return FixedShape(num_rows, size, max(self._pool.num_pages - 1, largest), max_kv_len)

    def _recorded_plan(
        self, packed: PackedInputs, pages: StepPages, size: int, masked: bool, number: int = -1, num_passes: int = 0
    ) -> StepPlan:
        """A step in static tensors, padded to `size` tokens, with as many rows of logits; or one of several passes."""
        static, attention = self._static_of(size, number), self._attention_of(size, masked, number)
        metadata = static.fill(packed, pages, self._scrap_slots)
        _plan(attention, packed, metadata)
        static.done()
        tables, num_logits = static.tables, len(packed.logit_rows)
        outputs = self._outputs if number < 0 else self._pass_outputs  # no pass leaves a token where another has none
        if packed.num_tokens < size and number <= 0:
            for out in outputs.values():  # attention leaves padding as an earlier step left it, maybe with NaN
                out[packed.num_tokens : size].zero_()
        return StepPlan(
            input_ids=static.fed[0],
            position_ids=static.fed[1],
            logits_to_keep=tables.logit_rows,
            logit_index=None if num_logits == size else slice(num_logits),
            attention=PlannedStep(tables.slots, attention, outputs),
            replay=partial(self._replay, (size, masked, packed.greedy, num_passes)),
            compile=self._compiled,
            landing=self._landing(size) if packed.greedy else None,
        )

    def _landing(self, size: int) -> torch.Tensor | None:
        """``[size]`` int64 in pinned memory, the same for all recordings of a size, as each is read before the next."""
        device = self._spec.device
        if device.type != "cuda" or device.index not in (None, torch.cuda.current_device()):
            return None  # `to_host` waits for a stream of the current one
        if size not in self._landings:
            self._landings[size] = torch.empty(size, dtype=torch.int64, pin_memory=True)
        return self._landings[size]

    def _replay(self, key: tuple[Any, ...], compute: Compute) -> Any:
        assert self._capture is not None
        if key not in self._recordings:
            if self._compiled is not None:
                with self._compiled.checked(f"a step of {key[0]} tokens"):
                    compute()
            try:
                self._recordings[key] = self._capture(compute), compute
            except PluginError as error:
                what = key if self._recordings else None  # any, as long as none was recorded
                self._num_failed[what] += 1
                if self._num_failed[what] == 1:  # maybe another thread was the cause; a later step tries again
                    return compute()
                size = f"of {key[0]} tokens " if self._recordings else ""
                warnings.warn(f"{error}. From here on, steps {size}run without a graph", RuntimeWarning, stacklevel=2)
                self.recorded_sizes = self.recorded_sizes if self._recordings else ()
                self._recordings[key] = compute, compute
        return self._recordings[key][0]()


def _plan(attention: dict[LayerSpec, PagedAttention], packed: PackedInputs, metadata: PagedMetadata) -> None:
    for layer, planned in attention.items():
        planned.plan(metadata, None if packed.trees is None else tree_mask(packed, layer.sliding_window))


def padded_layer(layer: LayerSpec, head_dims: tuple[int, ...]) -> LayerSpec:
    """`layer` with heads as long as the kernels take them, and with its true scale.

    Zeros at the end of keys and queries change no score. Zeros at the end of values are cut off the output.
    """
    dim = min(dim for dim in head_dims if dim >= max(layer.key_dim, layer.value_dim))
    return replace(layer, key_dim=dim, value_dim=dim)


def write_kv(
    keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Store ``key [n, heads, key_dim]`` and ``value [n, heads, value_dim]`` in the pages at ``slots [n]``.

    Kernels replace masked scores by minus infinity, and then multiply every value of a tile, masked ones by 0. So a NaN
    in a key reaches only those who see it, and a NaN in a value reaches others too. A head whose value is not finite is
    therefore stored with a key of NaN and finite values: who sees it gets NaN, and nobody else.
    """
    if key.shape == value.shape:
        key = torch.add(key, value, alpha=0)
    else:
        key = key + 0 * torch.linalg.vector_norm(value, float("inf"), dim=-1, keepdim=True)
    for pages, new in ((keys, key), (values, value.nan_to_num(0.0, 0.0, 0.0))):
        pages.view(-1, *pages.shape[2:])[..., : new.shape[2]].index_copy_(0, slots, new)
