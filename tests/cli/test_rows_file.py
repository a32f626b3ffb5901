"""The file of an experiment's rows: nothing in it is lost, whatever happens to the experiment."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from emssd.cli.experiment import RowsFile
from emssd.errors import ConfigError, OutputError
from tests.support.tiers import looped


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


def test_rows_that_are_replaced_stay_until_there_is_a_new_one(folder: Path) -> None:
    before = (folder / "rows.jsonl").read_text()
    with closing(RowsFile(folder, overwrite=True)) as rows:
        assert not rows.has(0, row(0)["overrides"])
        assert rows.path.read_text() == before
        rows.append(row(7))
        assert rows.rows == [row(7)]
    assert json.loads(rows.path.read_text()) == row(7)


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


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\udcff"])
def test_any_override_can_be_kept(end: str, tmp_path: Path) -> None:
    odd = row(0, f"data.template=a{end}b")
    with closing(RowsFile(tmp_path)) as rows:
        rows.append(odd)
        assert rows.rows == [odd]
    with closing(RowsFile(tmp_path, resume=True)) as rows:
        assert rows.has(0, odd["overrides"])


def test_rows_of_an_earlier_version_may_hold_other_lines_ends(tmp_path: Path) -> None:
    odd = row(0, "data.template=a\u2028b")
    (tmp_path / "rows.jsonl").write_text(json.dumps(odd, ensure_ascii=False) + "\n", encoding="utf-8")
    with closing(RowsFile(tmp_path, resume=True)) as rows:
        assert rows.has(0, odd["overrides"])
        assert rows.rows == [odd]
