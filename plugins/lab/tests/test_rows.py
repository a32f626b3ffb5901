"""Files that are read, and those that are refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from emssd_lab.report.__main__ import main
from emssd_lab.report.rows import Row, read, read_rows

from tests.support.tiers import looped

from .conftest import value, write, write_run

GOOD = json.dumps(value()) + "\n\n"  # an empty line counts


def bad(*path: str, is_now: object = None) -> str:
    """A good row, and one that lacks a field, or has another value there."""
    row = value()
    *groups, name = path
    group: Any = row
    for key in groups:
        group = group[key]
    if is_now is None:
        del group[name]
    else:
        group[name] = is_now
    return GOOD + json.dumps(row)


@looped(
    "file, text, error",
    [
        ("nowhere", None, "there is no {}"),
        (".", None, "python -m emssd -m experiment="),
        (".", "", "there are neither rows"),
        ("rows.jsonl", "", "{} holds no rows yet"),
        ("rows.jsonl", bad("batching"), "{}:3 is of another format: it has no batching"),
        ("rows.jsonl", bad("metrics", "decode_kv_tokens"), "{}:3 is of another format: it has no metrics.decode_kv_to"),
        ("rows.jsonl", bad("costs"), "{}:3 is of another format: it has no costs"),
        (
            "rows.jsonl",
            bad("provenance", "hardware", "flops_per_second"),
            "no provenance.hardware.bytes_per_second and",
        ),
        ("rows.jsonl", bad("batch_size", is_now="8"), 'its batch_size cannot be "8"'),
        ("rows.jsonl", bad("repeat", is_now=True), "its repeat cannot be true"),
        ("rows.jsonl", bad("options", is_now="x"), 'its options cannot be "x"'),
        ("rows.jsonl", bad("experiment"), "{}:3 is no row of an experiment"),
        ("rows.jsonl", GOOD + '{"experiment": "fi', "{}:3 is no JSON"),
        ("other.json", "[1]", "is no metrics.json"),
        ("other.json", "{", "cannot be read as JSON"),
        ("other.json", '{"decode_tokens_per_second": 1.0}', "has no title"),
        ("rows.jsonl --name ../x", GOOD, "--name is '../x'"),
        ("rows.jsonl --out rows.jsonl/out", GOOD, "cannot write the report to {}/out"),
    ],
)
def test_wrong_input_ends_with_one_sentence(
    file: str, text: str | None, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("other.json" if file.startswith("other") else "rows.jsonl").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(file.split())
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("emssd_lab.report: error: ")
    assert error.format(file.split()[0]) in line
    assert not Path("report").exists()


def test_everything_in_a_folder_is_found_and_nothing_twice(tmp_path: Path) -> None:
    """An experiment's rows stand for its numbered runs, which are not even read."""
    results = tmp_path / "results"
    rows = write(results / "fig1", [value("fig1", "greedy"), value("fig1", "greedy", repeat=2)])
    for folder in (".", "fig1/0", "fig1/other", "sweep/0"):
        write_run(results / folder)
    (results / "fig1" / "0" / "metrics.json").write_text("no JSON")
    write(results / "fig1" / "ablation", [value("ablation", "greedy")])
    material = read([tmp_path, results / "fig1", rows])
    assert [row.experiment for row in material.rows] == ["fig1", "fig1", "ablation"]
    assert [Path(folder).relative_to(tmp_path).as_posix() for folder in material.runs] == [
        "results", "results/fig1/other", "results/sweep/0",
    ]  # fmt: skip


@looped("end", ["\u2028", "\u2029", "\x85"])
def test_a_line_that_only_unicode_calls_ended_goes_on(end: str, tmp_path: Path) -> None:
    written = value("fig1", "ragged", batch_size=16, repeat=3, options=[f"data.template=a{end}b"])
    write(tmp_path, [])
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(written, ensure_ascii=False)] * 2) + "\n", encoding="utf-8")
    for row in (rows := read_rows(path)):
        assert isinstance(row, Row)
        assert (row.source, row.method, row.batch_size, row.repeat) == (str(path), "ragged", 16, 3)
        assert (row.metrics.num_new_tokens, row.options) == (40, (f"data.template=a{end}b",))
    assert len(rows) == 2
