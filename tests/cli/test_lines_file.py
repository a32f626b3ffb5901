"""The files that rows are appended to: a line is there whole or not at all, and one process at a time writes."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from emssd_lab.experiment.rows import RowsFile

from emssd.cli import lines_file
from emssd.cli.lines_file import LinesFile
from emssd.cli.output import OutputFolder
from emssd.errors import ConfigError, OutputError
from tests.support.full_disk import room
from tests.support.tiers import looped


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def append(path: Path, *lines: bytes, keep: bool = False) -> None:
    """Append lines in a run of their own, to those that are there, or to none."""
    with closing(LinesFile(path)) as file:
        if keep:
            file.keep()
        for line in lines:
            file.append(line)


def test_a_disk_that_gets_full_within_a_line_leaves_whole_lines(path: Path) -> None:
    with closing(LinesFile(path)) as lines:
        lines.append(b"first\n")
        with room(9), pytest.raises(OSError, match="File too large"):
            lines.append(b"second\n")
        assert path.read_bytes() == b"first\n"
        lines.append(b"third\n")
    assert path.read_bytes() == b"first\nthird\n"


def test_a_file_that_is_replaced_on_a_full_disk_stays_as_it_was(tmp_path: Path) -> None:
    with OutputFolder(tmp_path) as output:
        output.write_metrics({"num_steps": 1})
        refused = r"cannot write .*metrics.json: File too large; finished rows stay in"
        with room(5), pytest.raises(OutputError, match=refused):
            output.write_metrics({"num_steps": 2})
        assert output.read_metrics() == {"num_steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


def test_what_is_not_kept_stays_until_there_is_a_line(path: Path) -> None:
    path.write_bytes(b"a\nb\ntorn")
    with closing(LinesFile(path)) as lines:
        assert lines.keep() == [b"a", b"b"]
    assert path.read_bytes() == b"a\nb\ntorn"
    append(path, b"c\n", keep=True)
    assert path.read_bytes() == b"a\nb\nc\n"
    append(path)
    assert path.read_bytes() == b"a\nb\nc\n"
    append(path, b"d\n")
    assert path.read_bytes() == b"d\n"


def test_an_empty_file_goes_with_the_folders_that_were_made_for_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    lines = LinesFile(tmp_path / "there" / "a" / "b" / "rows.jsonl")
    (tmp_path / "there" / "a" / "other").write_text("of somebody else")
    lines.close()
    lines.close()
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "a", "other"]


def test_a_file_that_was_removed_before_it_was_locked_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run has it, and ends without a row between our opening it and our locking it."""
    pytest.importorskip("fcntl", reason="file locks are Unix")
    other, lock = LinesFile(path), lines_file.lock

    def after_the_other(file: int) -> None:
        other.close()
        lock(file)

    monkeypatch.setattr(lines_file, "lock", after_the_other)
    lines = LinesFile(path)
    monkeypatch.undo()
    with pytest.raises(OutputError, match="is being written by another run"):
        LinesFile(path)
    lines.append(b"a\n")
    lines.close()
    assert path.read_bytes() == b"a\n"


def test_a_file_of_another_run_at_the_same_place_is_left_alone(path: Path) -> None:
    lines = LinesFile(path)
    path.unlink()  # by hand
    path.write_bytes(b"")
    lines.close()
    assert path.exists()


def row(job: int, *more: str) -> dict[str, Any]:
    return {"job": job, "overrides": [f"batch_size={job}", *more]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two whole rows, and one that was cut short."""
    with closing(RowsFile(tmp_path)) as rows:
        rows.append(row(0))
        rows.append(row(1))
    with rows.path.open("a") as file:
        file.write('{"job": 2, "overr')
    return tmp_path


def test_rows_are_kept_and_a_torn_one_goes_with_the_next(folder: Path) -> None:
    before = (folder / "rows.jsonl").read_text()
    with closing(RowsFile(folder, resume=True)) as rows:
        assert [rows.has(job, row(job)["overrides"]) for job in range(3)] == [True, True, False]
        assert rows.rows == [row(0), row(1)]
        assert rows.path.read_text() == before  # a kill from here on loses nothing
        rows.append(row(2))
        rows.append(row(3))
        assert rows.rows == [row(job) for job in range(4)]
    assert [json.loads(line) for line in rows.path.read_text().splitlines()] == [row(job) for job in range(4)]


def test_a_job_that_was_another_one(folder: Path) -> None:
    with closing(RowsFile(folder, resume=True)) as rows:
        assert rows.has(1, ["batch_size=1", "progress=false", "resume=true"])
        with pytest.raises(ConfigError, match=r"job 1 of .*rows.jsonl was batch_size=1, and is now batch_size=4"):
            rows.has(1, ["batch_size=4"])


NO_ROWS = ["oops", "[1]", "{}", '{"job": "x", "overrides": []}', '{"job": 1.5, "overrides": []}']
NO_ROWS += ['{"job": 1, "overrides": null}', '{"job": 1, "overrides": [1]}']


@looped(
    "line, wrong",
    [*((line, "no row: its? .*; take that line out, and its row is made again") for line in NO_ROWS),
     (json.dumps(row(0)), "a second row with the job 0, after line 1; take one of the two out")],
)  # fmt: skip
def test_a_line_that_cannot_be_kept(line: str, wrong: str, folder: Path) -> None:
    path = folder / "rows.jsonl"
    path.write_text(f"{json.dumps(row(0))}\n{json.dumps(row(1))}\n{line}\n")
    before = path.read_text()
    with pytest.raises(OutputError, match=f"rows.jsonl:3 is {wrong}"):
        RowsFile(folder, resume=True)
    assert path.read_text() == before


@looped("end", ["\u2028", "\u2029", "\x85", "\udcff"])
@looped("is_ascii", [True, False])
def test_any_override_can_be_kept(end: str, is_ascii: bool, tmp_path: Path) -> None:
    """Rows of an earlier version may hold such ends of lines as they are."""
    odd = row(0, f"data.template=a{end}b")
    with closing(RowsFile(tmp_path, overwrite=True)) as rows:
        rows.append(odd)
        assert rows.rows == [odd]
    if not is_ascii:
        rows.path.write_text(json.dumps(odd, ensure_ascii=False) + "\n", encoding="utf-8", errors="surrogatepass")
    with closing(RowsFile(tmp_path, resume=True)) as rows:
        assert rows.has(0, odd["overrides"])
        assert rows.rows == [odd]
