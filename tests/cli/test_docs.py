"""The commands of docs/long_jobs.md, run as they stand there, one after the other."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "long_jobs.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.docs
def test_the_commands_of_the_page_on_long_jobs(emssd: Callable, work: Path) -> None:
    (records,) = blocks("json")
    (work / "questions.jsonl").write_text(records)
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    assert [command[:3] for command in commands] == [["python", "-m", "emssd"]] * 3
    first, second, third = (command[3:] for command in commands)

    assert emssd(*first).status == 0
    path = work / "job" / "generations.jsonl"
    whole = path.read_text().splitlines()
    assert {json.loads(line)["id"] for line in whole} == {"for", "assert", "lambda"}
    (error,) = (work / "job" / "errors.jsonl").read_text().splitlines()
    assert json.loads(error)["id"] == "questions.jsonl:3"

    path.write_text(whole[0] + "\n" + whole[1][:40])
    assert emssd(*second).status == 0
    tokens = {json.loads(line)["id"]: json.loads(line)["token_ids"] for line in path.read_text().splitlines()}
    assert tokens == {json.loads(line)["id"]: json.loads(line)["token_ids"] for line in whole}
    assert len(path.read_text().splitlines()) == 3

    assert emssd(*third).status == 0
    rows = [json.loads(line) for line in (work / "stopped" / "generations.jsonl").read_text().splitlines()]
    limits = {"for": 20, "assert": 64, "lambda": 30}
    assert all(len(row["token_ids"]) <= limits[row["id"]] for row in rows)
    assert "stop" in {row["finish_reason"] for row in rows}
    assert not any(" the " in row["text"] or "\n\n" in row["text"] for row in rows)
