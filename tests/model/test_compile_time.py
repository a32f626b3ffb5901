"""While something is compiled, a bar says how far it is and how long the rest takes; elsewhere there are lines."""

from __future__ import annotations

import io
import logging

import pytest

from emssd.cli.progress import show_messages
from emssd.cli.terminal import plain_console
from emssd.model.compile import compile_time
from emssd.model.compile.compile_time import Compiling

LINES = ("compiling Model …\n", "compiling Model: 0:00:20, about 0:01:00 left\n", "compiling Model took 0:01:40\n")


@pytest.mark.parametrize(("terminal", "bars"), [(False, True), (True, False), (True, True)])
def test_a_bar_or_lines_say_how_long_compiling_takes(
    terminal: bool, bars: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four layers, on a machine that is half as fast as alone: 20 seconds of tracing, and 60 of 80."""
    now = [100.0]
    for name, value in {"monotonic": lambda: now[0], "process_time": lambda: now[0] / 2}.items():
        monkeypatch.setattr(compile_time, name, value)
    monkeypatch.setattr(compile_time, "_FIXED", 10.0)
    monkeypatch.setattr(compile_time, "_PER_TRACED", 2.0)
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger := logging.getLogger("emssd"), name, getattr(logger, name))
    console = plain_console(file=(file := io.StringIO()), force_terminal=terminal, width=120)
    show_messages(console, bars=bars)
    with Compiling("Model", 4) as work:
        seen = [(work.share, work.clock)]
        for work.num_traced, now[0] in ((2, 110.0), (4, 120.0), (4, 140.0), (4, 200.0)):
            if now[0] == 120.0:
                work.traced()
            seen.append((work.share, work.clock))
    assert seen == [
        (0.0, "0:00:00"),
        (0.125, "0:00:10, about 0:01:10 left"),
        (0.25, "0:00:20, about 0:01:00 left"),
        (0.5, "0:00:40, about 0:00:40 left"),
        (0.99, "0:01:40, about 0:00:01 left"),
    ]
    if not (terminal and bars):
        assert file.getvalue() == "".join(LINES)
    else:
        assert "about 0:01:00 left" in file.getvalue()
        assert "compiling Model:" not in file.getvalue()
        assert file.getvalue().endswith(LINES[-1])
