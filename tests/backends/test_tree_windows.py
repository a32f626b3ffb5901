"""In a tree, sliding windows count positions, which go by depth, and not the slots that nodes lie in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd.attention import AttentionBackend, KVCacheSpec, LayerSpec, StepPlan
from emssd.decoding.packing import pack, pack_nodes
from emssd.drafting import Draft
from emssd.sequences import Request, Row
from emssd.testing.machines import check_plan
from emssd.testing.oracle import DenseBackend
from emssd.testing.strategies import Waves, trees
from tests.support.backends import MakeBackend
from tests.support.trees import TREE_BACKENDS

LAYERS = tuple(LayerSpec(2, 1, 3, 3, 1.0, window, softcap) for window, softcap in ((1, None), (2, 5.0), (3, None)))
SPEC = KVCacheSpec(LAYERS, torch.float64, torch.device("cpu"), 4, 64, trees=True)


@pytest.mark.parametrize("make", TREE_BACKENDS.values(), ids=TREE_BACKENDS)
@settings(max_examples=settings.default.max_examples // 3)
@given(shapes=st.lists(st.integers(3, 7).flatmap(trees), min_size=1, max_size=3), cached=st.integers(0, 2))
def test_windows_shorter_than_a_tree_is_deep(make: MakeBackend, shapes: list[tuple[int, ...]], cached: int) -> None:
    """The first nodes of each tree are computed in a step before the others."""
    backend, dense, waves = make(), DenseBackend(), Waves(SPEC, 0)
    for each in (backend, dense):
        each.allocate(SPEC)
    rows = [Row(Request(str(row), tuple(range(10 * row, 10 * row + 2 + row)), 20)) for row in range(len(shapes))]
    nodes = [[(100 + 10 * row + node, parent) for node, parent in enumerate(tree)] for row, tree in enumerate(shapes)]
    steps = [pack(rows, Draft.from_trees([tree[:cached] for tree in nodes]))]
    steps.append(
        pack_nodes(
            [row.request_id for row in rows],
            torch.tensor([token for tree in nodes for token, _ in tree[cached:]]),
            [len(tree) - cached for tree in shapes],
            [len(row.tokens) + len(tree) for row, tree in zip(rows, shapes, strict=True)],
            shapes,
        )
    )
    for packed in steps:
        plan, right = backend.plan(packed), dense.plan(packed)
        places = check_plan(plan, packed)
        for layer in range(len(LAYERS)):
            got, expected = (_forward(each, waves, made, layer) for each, made in ((backend, plan), (dense, right)))
            wanted = packed.logit_rows  # a prompt's tokens may be repeated as padding
            torch.testing.assert_close(got[places][wanted], expected[wanted], rtol=0, atol=1e-10)


def _forward(backend: AttentionBackend, waves: Waves, plan: StepPlan, layer: int) -> torch.Tensor:
    return backend.forward(plan, layer, *waves.qkv(plan.input_ids.flatten(), layer))
