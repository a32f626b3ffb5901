"""A step stays small: the calls of one, the files that it runs through, and the statements of `Engine.step`."""

from __future__ import annotations

from typing import Any


def test_a_step_of_two_rows_makes_few_calls(load: Any) -> None:
    program = load("step_calls")
    calls = program.calls_of_a_step("suffix")
    assert calls.total() <= 220
    assert program.num_files(calls) <= 25
    assert program.num_statements() <= 15
