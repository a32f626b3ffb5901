"""Runs in which rows are to be preempted fail where none was, whatever was counted before."""

from __future__ import annotations

import pytest
from emssd_none import NoneDrafter
from emssd_ragged import Kernels, RaggedConfig

from emssd.testing.engine_machine import EngineMachine
from emssd.testing.preemption import decode_in_little_memory, run_until_preempted

RAGGED = RaggedConfig(kernels=Kernels.torch)


class Roomy(EngineMachine):
    """There is room for everything."""

    max_kv_tokens = 10_000
    num_preempted = num_pieces = 3  # of a run before


class Usual(EngineMachine):
    """The default, which is short of room."""


def test_a_machine_that_preempts_nothing_fails() -> None:
    with pytest.raises(AssertionError, match=r"in 8 runs of Roomy, 0 rows were preempted, and \d+ pieces"):
        run_until_preempted(Roomy, share=1000, num_steps=3)


def test_a_machine_that_preempts_is_run_until_it_did() -> None:
    run_until_preempted(Usual, share=10, num_steps=12)
    assert Usual.num_preempted > 0 < Usual.num_pieces


def test_room_for_all_rows_is_no_little_memory() -> None:
    assert decode_in_little_memory(NoneDrafter(), RAGGED).report.num_preempted > 0
    with pytest.raises(AssertionError, match="0 rows were preempted in 512000 bytes"):
        decode_in_little_memory(NoneDrafter(), RAGGED, 1000)
