"""Other engines: what ran together stands together, and nothing else does."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from emssd_lab.report.sections.common import Plot
from emssd_lab.report.tables import Table

from benchmarks.peers_report import main, peers, read_peers
from tests.support.tiers import looped

RUN = {
    "script": "benchmarks/cpu_peers.py",
    "commit": "abc1234",
    "date": "2026-11-21",
    "processor": "made up | for tests",
    "data": "questions.jsonl",
    "models": {"target": "t", "draft": "d"},
    "options": {"threads": 2, "repeats": 2, "num_prompts": 32, "batch_sizes": [4, 8], "emssd": ["compile=true"]},
    "versions": {"emssd": {"emssd": "0.1.0"}},
}


def write(folder: Path, name: str, rates: dict[str, float], sizes: Seq[int], **options: Any) -> Path:
    """A result with `rates` of its engines per row of a batch; `options` replace those of its run."""
    run = copy.deepcopy(RUN) | {"date": options.pop("date", RUN["date"])}
    run["options"] |= {"batch_sizes": list(sizes), **options}  # type: ignore[operator]
    cells = [
        {"peer": peer, "mode": "greedy", "batch_size": size, "tokens_per_second": [rate * size] * 2, "equal_rows": {}}
        for size in sizes
        for peer, rate in rates.items()
    ]
    path = folder / name
    path.write_text(json.dumps({"run": run, "cells": cells}))
    return path


def parts(*paths: Path) -> tuple[list[str], list[list[str]], dict[str, Plot]]:
    """Headings, the lines of each table without its heading, and plots of the section of these files."""
    blocks = peers(read_peers(paths)).blocks
    heads = [block.removeprefix("### ") for block in blocks if isinstance(block, str) and block.startswith("### ")]
    tables = [block.markdown().splitlines()[2:] for block in blocks if isinstance(block, Table)]
    return heads, tables, {block.name: block for block in blocks if isinstance(block, Plot)}


def test_runs_of_other_engines_stand_apart_with_their_own_rows_of_this_one(tmp_path: Path) -> None:
    one = write(tmp_path, "one.json", {"emssd": 30.0, "vllm": 20.0}, (4, 8))
    two = write(tmp_path, "two.json", {"emssd": 24.0, "hf": 6.0}, (8, 32), repeats=3)
    heads, (first, second), plots = parts(one, two)
    assert heads == ["emssd beside vllm", "emssd beside hf"]
    assert first[2:] == [
        "| 8 | greedy | emssd | 240 (240–240) |  |",
        "| 8 | greedy | vllm | 160 (160–160) | 1.50 |",
    ]
    assert second[:2] == ["| 8 | greedy | emssd | 192 (192–192) |  |", "| 8 | greedy | hf | 48 (48–48) | 4.00 |"]
    svgs = {name: plot.svg for name, plot in plots.items()}
    assert list(svgs) == ["peers_0", "peers_1"]
    assert [("vllm" in svg, ">hf<" in svg) for svg in svgs.values()] == [(True, False), (False, True)]
    assert [plot.title for plot in plots.values()] == [
        "Tokens/s by batch size, greedy: emssd beside vllm",
        "Tokens/s by batch size, greedy: emssd beside hf",
    ]


def test_a_run_that_was_cut_by_batch_size_is_shown_as_one(tmp_path: Path) -> None:
    large = write(tmp_path, "large.json", {"emssd": 30.0, "vllm": 20.0}, (4, 8))
    small = write(tmp_path, "small.json", {"emssd": 60.0, "vllm": 20.0}, (1,), num_prompts=8, date="2026-11-22")
    heads, (lines,), plots = parts(large, small)
    assert heads == ["emssd beside vllm"]
    assert [line.split(" | ")[0] for line in lines] == ["| 1", "| 1", "| 4", "| 4", "| 8", "| 8"]
    assert lines[1] == "| 1 | greedy | vllm | 20 (20–20) | 3.00 |"
    assert list(plots) == ["peers_0"]
    texts = [block for block in peers(read_peers([large, small])).blocks if isinstance(block, str)]
    origin = next(text for text in texts if text.startswith("benchmarks"))
    assert "2026-11-21 and 2026-11-22, on made up | for tests, 2 threads" in origin
    assert "data questions.jsonl, emssd with compile=true" in origin
    files = f"`{large}` (batch size 4 and 8, 32 prompts) and `{small}` (batch size 1, 8 prompts)."
    assert origin.endswith(f"rows of {files}")


def test_runs_with_a_batch_size_in_common_or_another_option_are_not_joined(tmp_path: Path) -> None:
    rates = {"emssd": 30.0, "vllm": 20.0}
    first = write(tmp_path, "first.json", rates, (4, 8))
    again = write(tmp_path, "again.json", rates, (8, 16))
    other = write(tmp_path, "other.json", rates, (32,), dtype="float32")
    assert parts(first, again)[0] == ["emssd beside vllm"] * 2
    assert parts(first, other)[0] == ["emssd beside vllm"] * 2


@looped(
    "text, error",
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "is no result of benchmarks/cpu_peers.py"),
        ('{"run": {}, "cells": [{"peer": "x"}]}', "a cell has no 'batch_size'"),
        ('{"run": {}, "cells": []}', "its run has no 'script'"),
    ],
)
def test_a_file_of_another_kind_is_named(
    text: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), "--peers", str(path), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line
    assert str(path) in line
