"""Every backend equals the dense reference after any history, and the machine that says so finds planted faults."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from emssd_padded.backend import PaddedBackend
from emssd_ragged.fused import FusedKernels
from emssd_ragged.grouped import GroupedKernels
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from emssd.attention import Kept, KVCacheSpec, LayerSpec, PackedInputs, PagedBackend, StepMask, StepPlan, additive_mask
from emssd.testing import AttentionBackendConformance
from emssd.testing.machines import BackendMachine
from emssd.testing.oracle import DenseBackend
from tests.support.backends import BACKENDS, MakeBackend
from tests.support.reference_kernels import ReferenceKernels, rerun


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


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_backend_shows_no_query_what_is_not_its_own_and_forgets_steps_that_failed(make: MakeBackend) -> None:
    chosen = {"make_backend": lambda self: make(), "num_examples": 8}
    suite = type("Suite", (AttentionBackendConformance,), chosen)()
    suite.test_no_query_sees_what_is_not_its_own()
    suite.test_a_step_that_failed_never_happened()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_has_its_bits_in_any_batch_with_the_backend_that_says_so(dtype: torch.dtype, kernels: None) -> None:
    chosen = {"make_backend": lambda self: BACKENDS["ragged-fused"](), "num_examples": 8, "dtype": dtype}
    type("Suite", (AttentionBackendConformance,), chosen)().test_bits_are_those_of_a_row_alone()


class WrongLayers(DenseBackend):
    """Computes by other rules than those it was given."""

    def __init__(self, change: Callable[[LayerSpec], LayerSpec]) -> None:
        super().__init__()
        self._change = change

    def allocate(self, spec: KVCacheSpec) -> None:
        super().allocate(replace(spec, layers=tuple(self._change(layer) for layer in spec.layers)))


class RollsBackOneLess(PaddedBackend):
    """In `commit` alone it would harm nobody, as the next plan cuts rows to where their new tokens go."""

    def _drop(self, request_ids: Iterable[str], kv_lens: Iterable[int]) -> None:
        super()._drop(tuple(request_ids), [length + 1 for length in kv_lens])


class Ragged(PagedBackend):
    def __init__(self, page_size: int = 16) -> None:
        super().__init__(GroupedKernels(), page_size=page_size)


class RollsBackOneMore(Ragged):
    def commit(self, kept: Kept) -> None:
        super().commit(Kept(kept.request_ids, tuple(length - 1 for length in kept.kv_lens)))


class ForgetsToRelease(Ragged):
    def release(self, request_ids: Iterable[str]) -> None:
        super().release(list(request_ids)[1:])


class LeavesHolesVisible(PaddedBackend):
    def commit(self, kept: Kept) -> None:
        positions = self._positions.clone()
        super().commit(kept)
        self._positions = positions


class MixesRows(PaddedBackend):
    """Finished rows leave, and the KV of the others stays where it was."""

    def release(self, request_ids: Iterable[str]) -> None:
        self._table.release(request_ids)


class ReadsBeforeWriting(Ragged):
    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        out = super().forward(plan, layer, query, torch.zeros_like(key), torch.zeros_like(value))
        super().forward(plan, layer, query, key, value)
        return out


class InterleavesHeads(Ragged):
    """Query head h reads KV head h modulo their number, in the place of groups of neighbours."""

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        groups, heads = query.shape[1] // key.shape[1], query.shape[1]
        order = torch.arange(heads).view(groups, -1).T.flatten()
        out = torch.empty(len(query), heads, value.shape[2], dtype=query.dtype)
        out[:, order] = super().forward(plan, layer, query[:, order], key, value)
        return out


class CountsPositionsFromOne(Ragged):
    def plan(self, packed: PackedInputs) -> StepPlan:
        plan = super().plan(packed)
        plan.position_ids = plan.position_ids + 1
        return plan


class TakesLogitsOfTheNextToken(Ragged):
    def plan(self, packed: PackedInputs) -> StepPlan:
        plan = super().plan(packed)
        plan.logits_to_keep = (plan.logits_to_keep + 1) % packed.num_tokens
        return plan


class WritesPaddingOverRealTokens(PagedBackend):
    """The KV of padding tokens goes to the first page in the place of the one that nobody reads."""

    def __init__(self) -> None:
        super().__init__(ReferenceKernels(capture=rerun), page_size=3, memory_fraction=1.0)

    def plan(self, packed: PackedInputs) -> StepPlan:
        plan = super().plan(packed)
        plan.attention.slots[packed.num_tokens :] = 0
        return plan


class AttendsToStalePages(PagedBackend):
    """Plans the rows of the step before."""

    def __init__(self) -> None:
        super().__init__(ReferenceKernels(), page_size=3)

    def plan(self, packed: PackedInputs) -> StepPlan:
        before = self._table.pages(packed.request_ids[0])[:]
        plan = super().plan(packed)
        self._table._pages[packed.request_ids[0]][: len(before)] = array("i", reversed(before))
        return plan


class LosesPagesThatGrow(PagedBackend):
    """A pool that grows begins anew, and forgets what its pages held."""

    def __init__(self) -> None:
        super().__init__(ReferenceKernels(), page_size=3)

    def _grow_pool(self) -> None:
        super()._grow_pool()
        for pages in self._pool.keys:
            pages.zero_()


class SeesSiblings(Ragged):
    def plan(self, packed: PackedInputs) -> StepPlan:
        plan = super().plan(packed)
        for group in plan.attention.groups:
            group.mask.hidden = None
        return plan


class SeesSiblingsInASlab(PaddedBackend):
    def plan(self, packed: PackedInputs) -> StepPlan:
        plan = super().plan(packed)
        plan.attention.mask.hidden = None
        return plan


class SeesCachedSiblings(PaddedBackend):
    """Hides only the nodes of this step."""

    def plan(self, packed: PackedInputs) -> StepPlan:
        plan = super().plan(packed)
        if (hidden := plan.attention.mask.hidden) is not None:
            for row, (name, length) in enumerate(zip(packed.request_ids, packed.lengths, strict=True)):
                hidden[row, :, self._table.slots(name)[:-length]] = False
        return plan


class MeasuresWindowsInSlots(GroupedKernels):
    """In rows with trees, where a token's slot is not its position."""

    def _mask(self, packed: PackedInputs, rows: list[int], positions: torch.Tensor, num_slots: int) -> StepMask:
        mask = super()._mask(packed, rows, positions, num_slots)
        if mask.hidden is None:
            return mask
        like = torch.empty(0, dtype=torch.float64)
        for window in {layer.sliding_window for layer in self._spec.layers} - {None}:
            seen = mask.additive(None, like) == 0
            slots = torch.arange(seen.shape[2])
            for place, row in enumerate(rows):
                queries = slots[packed.kv_lens[row] - packed.lengths[row] : packed.kv_lens[row], None]
                seen[place, : len(queries)] &= slots > queries - window
            mask._masks[window, like.device, like.dtype] = additive_mask(seen, like.dtype)
        return mask


class KeepsWhatLiesBetween(Ragged):
    def commit(self, kept: Kept) -> None:
        super().commit(Kept(kept.request_ids, kept.kv_lens))


class MovesInTheWrongOrder(Ragged):
    def commit(self, kept: Kept) -> None:
        super().commit(Kept(kept.request_ids, kept.kv_lens, tuple(nodes[::-1] for nodes in kept.sources)))


class MovesTheFirstLayerOnly(Ragged):
    def _move(self, kept: Kept) -> None:
        keys, self._pool.keys = self._pool.keys, self._pool.keys[:1]
        super()._move(kept)
        self._pool.keys = keys


class MovesKeysOnly(PaddedBackend):
    def _move(self, kept: Kept) -> None:
        values, self._values = self._values, []
        super()._move(kept)
        self._values = values


class ForgetsCachedNodes(PaddedBackend):
    """Takes the nodes of earlier steps for a chain."""

    def plan(self, packed: PackedInputs) -> StepPlan:
        if packed.trees is not None:
            trees = tuple(
                tree if len(tree) <= length else () for tree, length in zip(packed.trees, packed.lengths, strict=True)
            )
            packed = replace(packed, trees=trees)
        return super().plan(packed)


FAULTS: dict[str, MakeBackend] = {
    "sees siblings": SeesSiblings,
    "sees siblings in a slab": SeesSiblingsInASlab,
    "sees siblings that are cached": SeesCachedSiblings,
    "measures windows in slots": lambda: PagedBackend(MeasuresWindowsInSlots(), page_size=3),
    "keeps what lies between accepted nodes": KeepsWhatLiesBetween,
    "moves accepted nodes in the wrong order": MovesInTheWrongOrder,
    "moves the keys of the first layer only": MovesTheFirstLayerOnly,
    "moves keys only": MovesKeysOnly,
    "takes cached nodes for a chain": ForgetsCachedNodes,
    "writes padding over real tokens": WritesPaddingOverRealTokens,
    "attends to stale pages": AttendsToStalePages,
    "loses pages that grow": LosesPagesThatGrow,
    "window one wider": lambda: WrongLayers(
        lambda layer: replace(layer, sliding_window=layer.sliding_window and layer.sliding_window + 1)
    ),
    "window ignored": lambda: WrongLayers(lambda layer: replace(layer, sliding_window=None)),
    "softcap ignored": lambda: WrongLayers(lambda layer: replace(layer, softcap=None)),
    "scale ignored": lambda: WrongLayers(lambda layer: replace(layer, scale=layer.key_dim**-0.5)),
    "rolls back one less": RollsBackOneLess,
    "rolls back one more": lambda: RollsBackOneMore(page_size=1),
    "forgets to release": lambda: ForgetsToRelease(page_size=3),
    "leaves holes visible": LeavesHolesVisible,
    "mixes rows": MixesRows,
    "reads before writing": ReadsBeforeWriting,
    "interleaves heads": InterleavesHeads,
    "counts positions from one": CountsPositionsFromOne,
    "takes logits of the next token": TakesLogitsOfTheNextToken,
}


@pytest.mark.parametrize("make", FAULTS.values(), ids=FAULTS)
@pytest.mark.costly("plays random histories until the fault shows")
def test_machine_finds_a_planted_fault(make: MakeBackend) -> None:
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_machine(make, max_examples=300, phases=[Phase.generate], derandomize=True, database=None)
