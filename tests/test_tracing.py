"""Tests what conftest.py leaves out of coverage."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


@pytest.mark.parametrize("fails", [False, True])
def test_a_library_is_not_traced_and_its_caller_is_before_and_after(fails: bool, pytestconfig: pytest.Config) -> None:
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).parents[1] / "conftest.py"))
    seen: list[tuple[str, str]] = []

    def tracer(frame: FrameType, event: str, arg: object) -> Any:
        seen.append((frame.f_code.co_name, event))
        return tracer

    def inside() -> None:
        assert not fails

    def library(number: int, *, other: int) -> int:
        inside()
        return number + other

    def after() -> None:
        pass

    def caller() -> int | None:
        try:
            return int(conftest.untraced(library)(1, other=2))
        except AssertionError:
            return None
        finally:
            after()

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        result = caller()
    finally:
        sys.settrace(before)
    assert result == (None if fails else 3)
    named = [name for name, _ in seen]
    assert "library" not in named
    assert "inside" not in named
    assert named.index("caller") < named.index("after")
    assert ("caller", "return") in seen
