"""While something is compiled, a bar says how far it is and how long the rest takes; elsewhere there are lines."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from emssd.cli.progress import show_messages
from emssd.model import compile_time
from emssd.model.compile_time import compiling


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, bars: bool = True) -> str:
    """What is shown of four layers, whose tracing takes 10 seconds of what should be 50, and is 60."""
    now = [100.0]
    monkeypatch.setattr(compile_time, "monotonic", lambda: now[0])
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger := logging.getLogger("emssd"), name, getattr(logger, name))
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    show_messages(console, bars=bars)
    with compiling("Model", 4) as work:
        assert (work.share, work.left) == (0.0, None)
        work.num_traced, now[0] = 2, 105.0
        assert (work.share, work.left) == (0.1, pytest.approx(45.0))
        now[0] = 110.0
        work.traced()
        assert (work.share, work.left) == (0.2, pytest.approx(40.0))
        now[0] = 130.0
        assert (work.share, work.left) == (pytest.approx(0.6), pytest.approx(20.0))
        now[0] = 160.0
        assert work.share == 0.99
    assert work.share == 1.0
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize(("terminal", "bars"), [(False, True), (True, False)])
def test_lines_say_how_long_compiling_takes(terminal: bool, bars: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=terminal, bars=bars).splitlines() == [
        "compiling Model, once for all later runs …",
        "compiling Model takes about 0:00:40 more …",
        "compiling Model took 0:01:00",
    ]


def test_a_bar_moves_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, terminal=True)
    assert "about 0:00:40 left" in text
    assert "more" not in text
    assert text.endswith("compiling Model took 0:01:00\n")
