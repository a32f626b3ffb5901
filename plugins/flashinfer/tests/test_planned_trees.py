"""Token trees on planned kernels, eager and recorded: masks, positions, and the KV of accepted nodes moved together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emssd_testing.drafters import TreeDrafter
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference

from emssd.attention import AttentionBackend, Kept, PackedInputs, PagedBackend, StepPlan
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.model import TargetModel
from emssd.sequences import Request, Row
from plugins.flashinfer.tests.test_wrapper import CpuKernels
from tests.support.backends import engine_of
from tests.support.reference_kernels import ReferenceKernels, rerun
from tests.support.tiers import looped

PROMPTS = [[1, 5, 6, 7, 5], [9], [3] * 20, [8, 2, 8], [4, 4]]
NUM_NEW = 12


class Watching(PagedBackend):
    """Counts what proves that a test was about trees."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.masked = self.replayed = self.moved = 0

    def plan(self, packed: PackedInputs) -> StepPlan:
        plan = super().plan(packed)
        self.masked += packed.trees is not None
        self.replayed += packed.trees is not None and plan.replay is not None
        return plan

    def commit(self, kept: Kept) -> None:
        self.moved += len(kept.moves())
        super().commit(kept)


def generate(backend: AttentionBackend, target: TargetModel, references: dict[str, list[int]], **options: Any) -> None:
    """Decode by trees, and compare with greedy decoding of each prompt alone."""
    drafter = TreeDrafter(target.vocab_size, 6, references, seed=options.get("seed", 1))
    engine = engine_of(target, drafter, backend, max_step_tokens=16, static=not options.get("continuous", True))
    outputs = engine.generate(PROMPTS, NUM_NEW, ignore_eos=True)
    assert [list(output.token_ids) for output in outputs] == list(references.values())
    assert engine.report.mean_acceptance_length > 1, "no tree was of use"


@pytest.fixture(scope="module", params=["opt", "llama", "gemma2"])
def case(request: pytest.FixtureRequest) -> tuple[TargetModel, dict[str, list[int]]]:
    """Gemma 2 has layers with and without a window, which go by depth in a tree, so there are two masks a step."""
    model = tiny_model(request.param, max_model_len=64)
    return TargetModel(model), {str(i): greedy_reference(model, prompt, NUM_NEW) for i, prompt in enumerate(PROMPTS)}


@looped("continuous", [True, False])
@looped("recorded", [False, True])
def test_random_trees_give_the_tokens_of_greedy_decoding(
    recorded: bool, continuous: bool, case: tuple[TargetModel, dict[str, list[int]]]
) -> None:
    kernels = ReferenceKernels(capture=rerun if recorded else None, max_graph_tokens=20)
    backend = Watching(kernels, page_size=4, memory_fraction=1.0)
    generate(backend, *case, continuous=continuous)
    assert backend.masked > 3
    assert backend.moved > 0, "no accepted node was moved"
    assert (backend.replayed > 3) == recorded


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the real kernels")
def test_flashinfers_masked_wrappers_of_recorded_steps_do_too(
    case: tuple[TargetModel, dict[str, list[int]]], modules: list[Any]
) -> None:
    kernels = CpuKernels(capture=rerun, max_graph_tokens=20)
    backend = Watching(kernels, page_size=4, memory_fraction=1.0)
    generate(backend, *case)
    assert backend.moved > 0
    assert backend.replayed > 3


def plan_of(kernels: ReferenceKernels, parents: tuple[int, ...], **spec: Any) -> StepPlan:
    target = TargetModel(tiny_model("llama", max_model_len=64))
    backend = PagedBackend(kernels, page_size=4, memory_fraction=1.0)
    backend.allocate(replace(target.kv_cache_spec(2), **spec))
    draft = Draft(torch.zeros(len(parents), dtype=torch.int64), (0, len(parents)), parents)
    return backend.plan(pack([Row(Request("a", (1, 2, 3), 9))], draft))


@pytest.mark.parametrize(
    ("parents", "trees", "made"),
    [((-1, -1), False, (True, False)), ((-1, 0), True, (False, True)), ((-1, -1), True, (True, True))],
    ids=["no trees expected", "a chain", "a tree"],
)
def test_masked_kernels_of_recorded_steps_are_made_only_where_trees_may_come(
    parents: tuple[int, ...], trees: bool, made: tuple[bool, bool]
) -> None:
    """Beside the kernels without a mask of steps that are not recorded."""
    found = set[tuple[bool, bool]]()

    class Noting(ReferenceKernels):
        def attention(self, layer: Any, *, masked: bool = False, static: Any = None) -> Any:
            found.add((masked, static is not None))
            return super().attention(layer, masked=masked, static=static)

    plan = plan_of(Noting(capture=rerun, max_graph_tokens=8), parents, trees=trees)
    assert (plan.replay is not None) == trees
    assert found == {(False, False), made}


def test_a_row_longer_than_the_masks_buffer_is_not_recorded() -> None:
    kernels = ReferenceKernels(capture=rerun, max_graph_tokens=8)
    backend = PagedBackend(kernels, page_size=4, memory_fraction=1.0)
    spec = TargetModel(tiny_model("llama", max_model_len=64)).kv_cache_spec(3)
    backend.allocate(replace(spec, max_model_len=10, trees=True))  # of up to 18 tokens
    plans = []
    for length in (15, 16):
        row = Row(Request("a", tuple(range(length)), 9), num_cached=length - 1)
        draft = Draft(torch.zeros(3, dtype=torch.int64), (0, 3), (-1, -1, 0))
        plans.append(backend.plan(pack([row], draft)))
    assert [plan.replay is not None for plan in plans] == [True, False]
