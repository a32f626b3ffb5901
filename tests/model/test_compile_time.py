"""When ``model.compile=auto`` compiles; and how long it takes, in a bar, or in lines where there is no terminal."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from unittest.mock import Mock

import pytest

from emssd.cli.progress import show_messages
from emssd.cli.terminal import plain_console
from emssd.errors import CompileError, ConfigError
from emssd.model import ModelOptions, TargetModel
from emssd.model.compile import compilable, tracing
from emssd.model.compile.compilable import Compiling
from emssd.native import cache_dir

from .conftest import opt

LINES = ("compiling Model …\n", "compiling Model: 0:00:20, about 0:01:00 left\n", "compiling Model took 0:01:40\n")


@pytest.mark.parametrize(("terminal", "bars"), [(False, True), (True, False), (True, True)])
def test_a_bar_or_lines_say_how_long_compiling_takes(
    terminal: bool, bars: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four layers, on a machine that is half as fast as alone: 20 seconds of tracing, and 60 of 80."""
    now = [100.0]
    for name, value in {"monotonic": lambda: now[0], "process_time": lambda: now[0] / 2}.items():
        monkeypatch.setattr(compilable, name, value)
    monkeypatch.setattr(compilable, "_FIXED", 10.0)
    monkeypatch.setattr(compilable, "_PER_TRACED", 2.0)
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


def test_auto_takes_a_program_that_is_kept_and_no_other(kept_program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "compile_program", lambda *arguments: pytest.fail("it compiles"))
    target = TargetModel(opt(), ModelOptions(compile="auto"))
    assert target.compiled is not None
    assert target.compiled.folder == kept_program
    assert target.why_compiled == "compiled: its program was kept"
    target.compile_if_it_pays(10**12)
    assert target.compiled.folder == kept_program
    target.prepare_hidden([0])  # of which none is kept: the model itself gives them
    assert target.compiled is None


def test_auto_compiles_where_the_work_is_worth_it(
    kept_program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usual = str(cache_dir())
    monkeypatch.setenv("EMSSD_CACHE", str(tmp_path / "empty"))
    target = TargetModel(opt(), ModelOptions(compile="auto"))
    assert target.compiled is None
    target.compile_if_it_pays(10)
    assert target.compiled is None
    assert target.why_compiled.startswith("not compiled: 10 steps at most are too few to pay for it")
    assert not (tmp_path / "empty").exists()  # no lock, nothing built
    monkeypatch.setenv("EMSSD_CACHE", usual)  # where the program is that it would have to compile
    target.compile_if_it_pays(10**9)
    assert target.compiled is not None
    assert target.may_compile is True


def test_a_program_that_is_compiled_late_gives_the_hidden_states_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EMSSD_CACHE", str(tmp_path))
    compile_program = Mock(side_effect=CompileError("this is enough"))
    monkeypatch.setattr(tracing, "compile_program", compile_program)
    target = TargetModel(opt(), ModelOptions(compile="auto"))
    target.compile()
    target.prepare_hidden([0])
    target.compile_if_it_pays(10**9)
    assert [call.args[2] for call in compile_program.call_args_list] == [(0,)]


def test_auto_says_why_a_model_runs_as_it_is_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    model = opt()
    model.register_forward_hook(lambda *arguments: None)
    target = TargetModel(model, ModelOptions(compile="auto"))
    target.compile_if_it_pays(10**9)
    assert target.compiled is None
    assert "hook" in target.why_compiled
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]
    with pytest.raises(ConfigError, match="must be true, false or auto"):
        TargetModel(opt(), ModelOptions(compile="maybe"))  # type: ignore[arg-type]
