"""Whatever stdout lacks (characters, columns, a reader), and whenever Ctrl-C comes: no command ends in a traceback."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator

import pytest
from emssd_rest.cli import main as rest
from emssd_testing.authoring import main as plugins
from rich.table import Table

from emssd.cli.terminal import INTERRUPTED, plain_console, steady
from tests.support.tiers import looped


class Failing(io.TextIOWrapper):
    """A stream that takes some characters, and then fails."""

    def __init__(self, error: OSError, takes: int = 0) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self.left, self._error = takes, error

    def write(self, text: str) -> int:
        self.left -= len(text)
        if self.left < 0:
            raise self._error
        return len(text)


FULL, CLOSED = OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe")


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., io.BytesIO]:
    """``narrow(encoding)`` makes stdout one of this encoding, as PYTHONIOENCODING does; returns what it gets."""

    def make(encoding: str, name: str = "stdout") -> io.BytesIO:
        raw = io.BytesIO()
        monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, encoding=encoding, write_through=True))
        return raw

    return make


@looped("encoding", ["ascii", "latin-1"])
@looped(
    "command, some",
    [
        (lambda: plugins(["list"]), b"ragged"),
        (lambda: rest(["--help"]), b"datastores"),
    ],
)
def test_any_encoding_will_do(encoding: str, command: Callable[[], object], some: bytes, narrow: Callable) -> None:
    raw = narrow(encoding)
    try:
        command()
    except SystemExit as stop:
        assert not stop.code  # noqa: PT017  # of --help
    assert some in raw.getvalue()
    raw.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_run_prints_what_an_encoding_has(encoding: str, decode: Callable, narrow: Callable) -> None:
    out, err = narrow(encoding), narrow(encoding, "stderr")
    result = decode("progress=true")
    assert result.status == 0
    assert re.search(rb"^  \? \d\.\d\d: new tokens", out.getvalue(), re.MULTILINE)
    assert b"decoding ---" in err.getvalue()
    assert len(result.rows) == 5


@looped("columns", ["0", "1", "2", "7"], at_a_time=2)
def test_no_terminal_is_too_narrow(columns: str, decode: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    table = Table("a", "b")
    table.add_row("c", "d")
    console = plain_console(file=io.StringIO())
    console.print(table)
    assert console.width >= 40
    assert decode("progress=true", "check=greedy", "max_new_tokens=4").status == 0


@pytest.mark.parametrize(("error", "status"), [(FULL, 2), (CLOSED, 0)], ids=["full", "closed"])
@pytest.mark.parametrize("takes", [0, 100])
def test_results_are_written_though_stdout_takes_nothing(
    error: OSError, status: int, takes: int, decode: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Failing(error, takes))
    result = decode("-m", "drafter=none,llma", "max_new_tokens=4")
    assert result.status == status
    last = result.err.splitlines()[-1]
    assert "Traceback" not in result.err
    sentence = "emssd: error: cannot print to stdout: No space left on device; files are written as ever"
    assert (last == sentence) == (status == 2)
    for job in ("0", "1"):
        assert len((result.folder / job / "generations.jsonl").read_text().splitlines()) == 5
        assert (result.folder / job / "metrics.json").is_file()


def status_of(command: Callable[[], object]) -> object:
    """The status that a program of this command ends with."""
    with pytest.raises(SystemExit) as stop:
        steady("program")(command)()
    return stop.value.code


def test_a_failed_command_keeps_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Failing(FULL))
    assert status_of(lambda: (print("something"), sys.exit(7))) == 7


def test_help_that_cannot_be_printed_is_a_failure(plugins: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Failing(FULL))
    assert plugins("--help").sentence.startswith("cannot print to stdout: No space left on device")


def test_python_itself_does_not_fail_over_what_is_left_in_a_closed_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    stream = open(write, "w", closefd=False)  # noqa: SIM115  # closed below, which must not fail
    monkeypatch.setattr(sys, "stdout", stream)
    with steady("program"):
        print("something")
    stream.close()
    os.close(write)


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    """Ctrl-C raises, as in a terminal and not as behind a script's `&`; after a test it does what it did before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_command_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(lambda: os.kill(os.getpid(), signal.SIGINT)) == INTERRUPTED
    assert capsys.readouterr().err == "program: interrupted\n"


def test_a_second_ctrl_c_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)

    def command() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    assert status_of(command) == INTERRUPTED
    assert ended == [INTERRUPTED]
    with pytest.raises(KeyboardInterrupt):  # only because `_exit` came back
        os.kill(os.getpid(), signal.SIGINT)
    assert ended == [INTERRUPTED, INTERRUPTED]


def test_a_process_that_ignores_ctrl_c_goes_on_doing_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with steady("program"):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
