"""Runs in which rows are to be preempted fail where none was, whatever was counted before."""

from __future__ import annotations

import pytest
from emssd_none import NoneDrafter
from emssd_ragged import Kernels, RaggedConfig
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.engine_machine import EngineMachine
from tests.support.preemption import decode_in_little_memory, run_with_preemption

RAGGED = RaggedConfig(kernels=Kernels.torch)


class Roomy(EngineMachine):
    """There is room for everything."""

    max_kv_tokens = 10_000
    num_preempted = num_pieces = 3  # of a run before


class Usual(EngineMachine):
    """The default, which is short of room."""


def test_a_machine_that_preempts_nothing_fails() -> None:
    with pytest.raises(AssertionError, match=r"^0 rows of Roomy were preempted, even with a crowd .*, and \d+ pieces"):
        run_with_preemption(Roomy, share=1000, num_steps=3)


@pytest.mark.parametrize("derandomize", [False, True])
def test_the_simplest_example_of_a_crowd_preempts(derandomize: bool) -> None:
    class Crowded(Usual):
        crowded = True

    alone = settings(max_examples=1, stateful_step_count=1, phases=[Phase.generate], derandomize=derandomize)
    run_state_machine_as_test(Crowded, settings=alone)
    assert Crowded.num_preempted > 0 < Crowded.num_pieces


def test_where_nobody_was_preempted_a_crowd_comes() -> None:
    run_with_preemption(Usual, share=1000, num_steps=1)  # one example, the simplest, in which few come
    assert Usual.num_preempted == 0


def test_room_for_all_rows_is_no_little_memory() -> None:
    assert decode_in_little_memory(NoneDrafter(), RAGGED).report.num_preempted > 0
    with pytest.raises(AssertionError, match="0 rows were preempted in 512000 bytes"):
        decode_in_little_memory(NoneDrafter(), RAGGED, 1000)
