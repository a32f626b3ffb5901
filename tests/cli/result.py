"""The result of a command: its status, its output and its files."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def jsonl(path: Path) -> list[Any]:
    """The values of the lines of a file."""
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def files(folder: Path) -> dict[str, str]:
    """The content of each."""
    return {path.name: path.read_text() for path in folder.iterdir()}


def fenced(page: str, language: str) -> list[str]:
    """The blocks of code in a language on a page of docs."""
    text = (Path(__file__).resolve().parents[2] / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Result:
    """The result of a run of the command line."""

    status: int
    out: str
    err: str
    folder: Path

    @property
    def sentence(self) -> str:
        """The one line that a user's error gives, the last on stderr; nothing that looks like a result is printed."""
        assert self.status == 2, self
        assert "Traceback" not in self.err + self.out
        *before, line = self.err.splitlines()
        assert not any("error: " in message for message in before), self
        program, _, message = line.partition(": error: ")
        assert program in ("emssd", "emssd-plugins")
        return message

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of ``generations.jsonl``."""
        return jsonl(self.folder / "generations.jsonl")

    @property
    def tokens(self) -> dict[str, list[int]]:
        """The tokens of each row, none of which may be there twice."""
        rows = self.rows
        assert set(Counter(row["id"] for row in rows).values()) <= {1}
        return {row["id"]: row["token_ids"] for row in rows}

    @property
    def errors(self) -> dict[str, str]:
        """The sentences of ``errors.jsonl``, by id."""
        rows = jsonl(self.folder / "errors.jsonl")
        assert len({row["id"] for row in rows}) == len(rows)
        return {row["id"]: row["error"] for row in rows}

    @property
    def files(self) -> dict[str, str]:
        """The content of each file of the folder."""
        return files(self.folder)

    @property
    def metrics(self) -> dict[str, Any]:
        """``metrics.json`` of a run that went well, but for differences that a check may have found."""
        assert self.status in (0, 1), self
        values: dict[str, Any] = json.loads((self.folder / "metrics.json").read_text())
        check = values.get("check", {})
        assert self.status == (check.get("differences", 0) > 0 or not check.get("law", {}).get("right", True)), self
        return values


def assert_said(sentence: str, expected: str) -> None:
    """The sentence is the expected one, in which an ellipsis stands for any text."""
    assert re.fullmatch(".*".join(map(re.escape, expected.split("…"))), sentence, re.DOTALL), sentence
