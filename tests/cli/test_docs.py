"""The commands of docs/long_jobs.md, run as they stand there, one after the other."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import fenced, jsonl

PAGE = "long_jobs.md"


@pytest.mark.docs
def test_the_commands_of_the_page_on_long_jobs(emssd: Callable, work: Path) -> None:
    (records,) = fenced(PAGE, "json")
    (work / "questions.jsonl").write_text(records)
    commands = [shlex.split(line) for block in fenced(PAGE, "sh") for line in block.splitlines()]
    assert [command[:3] for command in commands] == [["python", "-m", "emssd"]] * 3
    first, second, third = (command[3:] for command in commands)

    assert emssd(*first).status == 0
    path = work / "job" / "generations.jsonl"
    tokens, lines = {row["id"]: row["token_ids"] for row in jsonl(path)}, path.read_text().splitlines()
    assert tokens.keys() == {"for", "assert", "lambda"}
    assert [error["id"] for error in jsonl(work / "job" / "errors.jsonl")] == ["questions.jsonl:3"]

    path.write_text(lines[0] + "\n" + lines[1][:40])
    assert emssd(*second).status == 0
    assert {row["id"]: row["token_ids"] for row in jsonl(path)} == tokens
    assert len(jsonl(path)) == 3

    assert emssd(*third).status == 0
    rows, limits = jsonl(work / "stopped" / "generations.jsonl"), {"for": 20, "assert": 64, "lambda": 30}
    assert all(len(row["token_ids"]) <= limits[row["id"]] for row in rows)
    assert "stop" in {row["finish_reason"] for row in rows}
    assert not any(" the " in row["text"] or "\n\n" in row["text"] for row in rows)
