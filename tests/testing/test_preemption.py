"""Runs in which rows are to be preempted fail where none was, whatever was counted before."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.engine_machine import EngineMachine


class Usual(EngineMachine):
    """The default, which is short of room."""


@pytest.mark.parametrize("derandomize", [False, True])
def test_the_simplest_example_of_a_crowd_preempts(derandomize: bool) -> None:
    class Crowded(Usual):
        crowded = True

    alone = settings(max_examples=1, stateful_step_count=1, phases=[Phase.generate], derandomize=derandomize)
    run_state_machine_as_test(Crowded, settings=alone)
    assert Crowded.num_preempted > 0 < Crowded.num_pieces
