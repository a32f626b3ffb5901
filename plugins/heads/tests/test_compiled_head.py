"""A compiled head is as right as one that is not, and where none can be compiled, the head runs as it is."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emssd_heads.compiled import CompiledHead
from emssd_heads.config import TargetSizes
from emssd_heads.eagle3.drafter import load_eagle3
from emssd_heads.eagle3.head import Eagle3Head

from emssd.model.compile import compiled, tracing
from emssd.native import NativeError
from tests.support.heads import assert_same, drawn_rows, numbers, run_ragged
from tests.support.perfect_head import SIZE, VOCAB
from tests.support.random_drafters import random_head
from tests.support.right_drafters import trial

ROWS = drawn_rows(2 * SIZE)


def load(seed: int = 0) -> Eagle3Head:
    return load_eagle3(random_head("eagle3", seed), TargetSizes(VOCAB, SIZE, 3, torch.float64)).head


def assert_same_outputs(are: list[Any], wanted: list[Any]) -> None:
    for row, other in zip(are, wanted, strict=True):
        for one, two in zip(row, other, strict=True):
            assert_same(one, two)


@pytest.mark.nightly
def test_a_compiled_head_gives_the_same(
    kernels: None, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    head, other = load(), load(seed=1)
    assert_same_outputs(run_ragged(head, ROWS, compile=True), run_ragged(head, ROWS))
    monkeypatch.setattr(tracing, "compile_module", pytest.fail)  # from here on it is found
    assert_same_outputs(run_ragged(head, ROWS, "padded", compile=True), run_ragged(head, ROWS))
    with pytest.raises(AssertionError):
        assert_same_outputs(run_ragged(other, ROWS), run_ragged(head, ROWS))
    assert_same_outputs(run_ragged(other, ROWS, compile=True), run_ragged(other, ROWS))

    program, inputs = CompiledHead(head), numbers(2, 3, 2 * SIZE)
    hidden, logits = program(inputs, torch.tensor([[4, 5, 6]] * 2), lambda _, q, k, v: 2 * q, torch.tensor([0, 2]))
    assert_same(hidden, head(inputs, torch.tensor([[4, 5, 6]] * 2), lambda _, q, k, v: 2 * q)[:, [0, 2]].flatten(0, 1))
    assert_same(logits, head.logits(hidden, pytest.fail))
    assert not recwarn.list


@pytest.mark.costly("compiles a head")
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_a_compiled_head_is_always_right(tree: str, kernels: None) -> None:
    case = trial("eagle3")
    drafter: Any = case.make_engine({"tree": tree}).drafting.drafters[0].drafter
    drafter._runner._compiled = CompiledHead(drafter._head)
    case.decode()
    assert case.is_full()


def test_without_a_compiler_a_head_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "declare_operators", Mock(side_effect=NativeError("no C++ compiler", "no compiler")))
    with pytest.warns(RuntimeWarning, match=r"^the drafter's head runs without model\.compile: no C\+\+ compiler$"):
        outputs = run_ragged(load(), ROWS, compile=True)
    assert_same_outputs(outputs, run_ragged(load(), ROWS))
