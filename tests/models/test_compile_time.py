"""While something is compiled, a bar says how far it is and how long the rest takes; elsewhere there are lines."""

from __future__ import annotations

import io
import logging

import pytest

from emssd.cli.progress import show_messages
from emssd.errors.terminal import plain_console
from emssd.model import compile_time
from emssd.model.compile_time import Compiling


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, bars: bool = True) -> str:
    """What is shown of four layers, whose tracing takes 10 seconds of what should be 50, and is 60."""
    now = [100.0]
    monkeypatch.setattr(compile_time, "monotonic", lambda: now[0])
    monkeypatch.setattr(compile_time, "_TRACING", 0.2)
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger := logging.getLogger("emssd"), name, getattr(logger, name))
    console = plain_console(file=io.StringIO(), force_terminal=terminal, width=120)
    show_messages(console, bars=bars)
    with Compiling("Model", 4) as work:
        seen = [(work.share, work.clock)]
        for work.num_traced, now[0] in ((2, 105.0), (4, 110.0), (4, 130.0), (4, 160.0)):
            if now[0] == 110.0:
                work.traced()
            seen.append((round(work.share, 2), work.clock))
    assert seen == [
        (0.0, "0:00:00"),
        (0.1, "0:00:05, about 0:00:45 left"),
        (0.2, "0:00:10, about 0:00:40 left"),
        (0.6, "0:00:30, about 0:00:20 left"),
        (0.99, "0:01:00, about 0:00:01 left"),
    ]
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize(("terminal", "bars"), [(False, True), (True, False)])
def test_lines_say_how_long_compiling_takes(terminal: bool, bars: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=terminal, bars=bars).splitlines() == [
        "compiling Model …",
        "compiling Model: 0:00:10, about 0:00:40 left",
        "compiling Model took 0:01:00",
    ]


def test_a_bar_moves_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, terminal=True)
    assert "about 0:00:40 left" in text
    assert "compiling Model:" not in text
    assert text.endswith("compiling Model took 0:01:00\n")
