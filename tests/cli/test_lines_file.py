"""The file that rows are appended to: a line is there whole or not at all, and one process at a time writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from emssd.cli import lines_file
from emssd.cli.lines_file import LinesFile
from emssd.cli.output import OutputFolder
from emssd.errors import OutputError
from tests.support.full_disk import room


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_a_disk_that_gets_full_within_a_line_leaves_whole_lines(path: Path) -> None:
    lines = LinesFile(path)
    lines.append(b"first\n")
    with room(9), pytest.raises(OSError, match="File too large"):
        lines.append(b"second\n")
    assert path.read_bytes() == b"first\n"
    lines.append(b"third\n")
    lines.close()
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
    lines = LinesFile(path)
    assert lines.keep() == [b"a", b"b"]
    lines.close()
    assert path.read_bytes() == b"a\nb\ntorn"
    lines = LinesFile(path)
    lines.keep()
    lines.append(b"c\n")
    lines.close()
    assert path.read_bytes() == b"a\nb\nc\n"
    lines = LinesFile(path)
    lines.append(b"d\n")
    lines.close()
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
