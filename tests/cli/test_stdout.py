"""The contents of stdout: rows alone with ``output_dir=-``, the text with ``prompt=``; flags that are no options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from emssd.cli.output import OutputFolder
from emssd.errors import OutputError


def test_rows_go_to_stdout_and_all_else_to_stderr(decode: Callable, work: Path) -> None:
    expected = {row["id"]: row["token_ids"] for row in decode().rows}
    before = sorted(work.rglob("*"))
    result = decode("output_dir=-", "overwrite=false", "check=plain", "drafter=llma")
    assert result.status == 0
    assert {row["id"]: row["token_ids"] for row in map(json.loads, result.out.splitlines())} == expected
    for shown in ("loading ", "│ new tokens", "check=plain: 5 exact", "  prompt: hello hello hello"):
        assert shown in result.err
    assert "written to" not in result.err
    assert sorted(work.rglob("*")) == before


def test_failures_are_told_where_no_file_could(decode: Callable, prompts: Path, work: Path) -> None:
    prompts.write_text("\n".join(["good", "x" * 200]))
    options = ("output_dir=-", "overwrite=false", "on_error=skip")
    result = decode(*options)
    assert [json.loads(line)["id"] for line in result.out.splitlines()] == ["prompts.txt:1"]
    assert "prompt prompts.txt:2 has 200 tokens" in " ".join(result.err.split())
    prompts.write_text("x" * 200)
    assert decode(*options).sentence == "none of the 1 prompts can be used; what is above says why"
    assert not (work / "-").exists()


def test_a_stdout_that_takes_no_more_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        error = BrokenPipeError(32, "Broken pipe")
        write = flush = lambda *_: None

    rows = OutputFolder(Path("-"))._rows
    for out, why in ((Closed(), "Broken pipe"), (None, "it is closed")):
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(OutputError, match=f"takes no more rows: {why}"):
            rows.append(b"{}\n")


def test_the_text_of_a_prompt_comes_first_and_figures_if_asked(emssd: Callable, model: str) -> None:
    options = [f"model.path={model}", "prompt=abc", "max_new_tokens=5", "progress=false", "overwrite=true"]
    options += ["output_dir=out"]
    result = emssd(*options, "check=plain")
    text = result.rows[0]["text"]
    assert result.out.startswith(f"{text}\ncheck=plain: 1 exact")
    assert result.out.count("\n") == text.count("\n") + 2
    assert "written to out/: " in result.err
    asked = emssd(*options, "figures=true")
    assert asked.out.startswith(f"{text}\n{model} · ")
    assert "│ new tokens" in asked.out
    assert "written to out/: " in asked.out


def test_figures_can_be_left_out(decode: Callable) -> None:
    result = decode("figures=false", "drafter=none")
    assert "│ new tokens" not in result.out
    assert "  prompt: hello hello hello" in result.out


def test_a_check_of_a_finished_job_is_no_check(decode: Callable) -> None:
    few, resume = ("drafter=none", "data.limit=1"), ("data.limit=1", "overwrite=false", "resume=true", "check=plain")
    decode(*few, "check=plain")
    assert decode(*resume).status == 0  # its metrics hold what was found
    decode(*few)
    assert decode(*resume).sentence == (
        "check=plain compares the rows that a run decodes, and out holds all; leave check= out, or decode them again "
        "with overwrite=true"
    )
