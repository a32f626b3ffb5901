"""Rows of other options are no repeats of each other, and titles say in which options settings differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emssd.errors import ConfigError
from emssd.report.cells import Grid, grids
from emssd.report.rows import Row, parse, read_rows
from tests.support.tiers import looped

from .conftest import value, write


def with_options(*options: str, **changes: Any) -> Row:
    made = parse(value(**changes) | {"options": list(options)}, "rows.jsonl")
    assert isinstance(made, Row)
    return made


def by_title(rows: list[Row]) -> dict[str, Grid]:
    return {
        grid.title.removeprefix("demo · llma · demo, 6 prompts, 64 new tokens · float32"): grid for grid in grids(rows)
    }


def test_options_that_a_row_has_no_field_for_tell_settings_apart() -> None:
    every = "data.path=x.txt"
    swept = [(every, "model.path=a/final"), (every, "model.path=b/final"), (every,), (every, "kv_memory=1GiB")]
    rows = [with_options(*options, method=method) for options in swept for method in ("greedy", "vanilla")]
    found = by_title(rows)
    assert list(found) == [" · model.path=a/final", " · model.path=b/final", "", " · kv_memory=1GiB"]
    assert all(len(cell.rows) == 1 for grid in found.values() for cell in grid.cells)


def test_a_baseline_has_the_same_options() -> None:
    rates = {("greedy", "a"): 10.0, ("vanilla", "a"): 20.0, ("greedy", "b"): 30.0, ("vanilla", "b"): 90.0}
    rows = [
        with_options(f"model.path={path}/final", method=method, metrics_decode_tokens_per_second=rate)
        for (method, path), rate in rates.items()
    ]
    cells = [grid.get("vanilla", 2) for grid in grids(rows)]
    assert [cell and cell.speedup and cell.speedup.median for cell in cells] == [2.0, 3.0]


def test_a_row_whose_options_are_no_list_is_refused() -> None:
    with pytest.raises(ConfigError, match='its options cannot be "x"'):
        parse(value() | {"options": "x"})


@looped("end", ["\u2028", "\u2029", "\x85"])
def test_what_only_unicode_calls_a_lines_end_does_not_end_a_row(end: str, tmp_path: Path) -> None:
    row = value() | {"options": [f"data.template=a{end}b"]}
    write(tmp_path, [])
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row, ensure_ascii=False)] * 2) + "\n", encoding="utf-8")
    read = read_rows(tmp_path / "rows.jsonl")
    assert [each.options for each in read if isinstance(each, Row)] == [(f"data.template=a{end}b",)] * 2


def test_an_error_names_the_line_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n" + json.dumps(value()) + "\n\n{}\n")
    with pytest.raises(ConfigError, match=r"rows.jsonl:4 is no row of an experiment"):
        read_rows(tmp_path / "rows.jsonl")
