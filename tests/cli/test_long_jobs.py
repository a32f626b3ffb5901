"""Jobs that are interrupted and resumed: nothing is lost or decoded twice, and no row is of other options."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emssd_lab.report.rows import read
from omegaconf import OmegaConf

from emssd.cli.output import OutputFolder
from emssd.errors import OutputError
from tests.support.tiers import looped

from .conftest import RESUME, files, jsonl, wait_for_rows


def cut_down(folder: Path, num_rows: int, rest: str = "") -> None:
    """Leave the folder of a finished run as if it had been killed after `num_rows` rows, in the middle of `rest`."""
    path = folder / "generations.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:num_rows]) + rest)
    (folder / "metrics.json").unlink()


@pytest.mark.nightly
def test_killed_twice_and_resumed_nothing_is_lost_or_decoded_twice(
    start: Callable[..., subprocess.Popen[str]], emssd: Callable, model: str, work: Path
) -> None:
    num_prompts, path = 80, work / "out" / "generations.jsonl"
    (work / "many.txt").write_text("".join(f"prompt number {i}\n" for i in range(num_prompts)))
    options = [f"model.path={model}", "data=text", "data.path=many.txt", "max_new_tokens=24", "batch_size=4"]
    options += ["output_dir=out"]

    def killed_at(num_rows: int, *arguments: str) -> int:
        """Rows that are there at the end of a run that is killed as soon as it has written `num_rows`."""
        process = start(*options, *arguments)
        wait_for_rows(path, num_rows, process)
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=200)
        assert process.returncode == -signal.SIGKILL, err
        return path.read_bytes().count(b"\n")

    first = killed_at(8)
    # Another drafter, backend and batch size: none of them determines the output.
    before = killed_at(24, "resume=true", "drafter=none", "backend=padded", "batch_size=3")
    assert 8 <= first < before < num_prompts
    with path.open("ab") as file:
        file.write(b'{"id": "many.txt:300", "prompt": "pro')  # what a kill within a write leaves
    result = emssd(*options, "resume=true")
    metrics, tokens = result.metrics, result.tokens
    assert (metrics["num_prompts"], metrics["num_resumed_prompts"]) == (num_prompts, before)
    assert metrics["num_new_tokens"] == sum(len(row["token_ids"]) for row in result.rows[before:])
    assert len(tokens) == num_prompts
    assert emssd(*options, "overwrite=true").tokens == tokens


def test_a_resumed_run_says_what_its_figures_cover(decode: Callable) -> None:
    first = decode()
    whole = first.tokens
    cut_down(first.folder, 2, '{"id": "prompts.txt:6", "pro')
    result = decode(*RESUME, "check=greedy", "progress=true")
    assert result.tokens == whole
    assert list(result.tokens)[:2] == list(whole)[:2]
    assert (result.metrics["num_prompts"], result.metrics["num_resumed_prompts"]) == (5, 2)
    assert result.metrics["check"]["exact"] == 3
    assert "resume=true: out/ holds 2 of 5 rows" in result.err
    assert "of the 3 rows of this run; finished before: 2" in result.out
    assert "8/8" in result.err  # two from before, and three both ways


def test_a_finished_job_is_left_as_it_is(decode: Callable) -> None:
    before = decode().files
    result = decode(*RESUME)
    assert result.metrics
    assert "resume=true: out/ holds 5 of 5 rows\nnothing is left to do\n" in result.err
    assert result.files == before


@looped("metrics", [None, "{oops"])
def test_killed_after_the_last_row_there_is_nothing_left_but_no_metrics(metrics: str | None, decode: Callable) -> None:
    folder = decode().folder
    cut_down(folder, 5)
    if metrics is not None:
        (folder / "metrics.json").write_text(metrics)
    result = decode(*RESUME)
    assert result.status == 0
    assert len(result.rows) == result.metrics["num_prompts"] == 5
    assert "nothing is left to do" in result.err


@pytest.mark.parametrize("left", [None, "", '{"id": "prompts.tx'])
def test_nothing_to_go_on_with_is_a_fresh_start(left: str | None, decode: Callable, work: Path) -> None:
    if left is not None:
        (work / "out").mkdir()
        (work / "out" / "generations.jsonl").write_text(left)
    result = decode(*RESUME)
    assert result.metrics["num_resumed_prompts"] == 0
    assert len(result.tokens) == 5
    assert "resume=true: out/ holds no rows, so this is a fresh start" in result.err


def test_what_does_not_determine_the_output_may_change(decode: Callable) -> None:
    cut_down(decode("data.limit=3").folder, 2)
    other = ["drafter=none", "backend=padded", "batch_size=1", "on_error=skip", "data.limit=4", "num_threads=1"]
    result = decode(*RESUME, *other)
    assert (result.metrics["num_prompts"], result.metrics["num_resumed_prompts"]) == (4, 2)
    assert OmegaConf.load(result.folder / "config.yaml").drafter.name == "none"


@looped(
    "arguments, names",
    [
        (["max_new_tokens=23"], "max_new_tokens"),
        (["stop=[x]", "ignore_eos=true"], "stop, ignore_eos"),
        (["data.unit=paragraph", "data.truncate=left"], "data.truncate, data.unit"),
        (["model.dtype=float32"], "model.dtype"),
    ],
)
def test_what_determines_the_output_may_not_change(
    arguments: list[str], names: str, decode: Callable, work: Path
) -> None:
    folder = work / "out"
    if not folder.exists():
        cut_down(decode().folder, 2)
    before = files(folder)
    assert decode(*RESUME, *arguments).sentence == (
        f"resume=true: the rows in out were made with another value of {names}; go on as out/config.yaml says, "
        f"or start again with overwrite=true or another output_dir"
    )
    assert files(folder) == before


@looped("change", [("abc abcd abc", "abc abcd abd"), ("hello hello hello\n", "\n")])
def test_rows_whose_prompts_have_changed_are_not_kept_silently(
    change: tuple[str, str], decode: Callable, prompts: Path
) -> None:
    cut_down(decode("batch_size=1").folder, 2)
    prompts.write_text(prompts.read_text().replace(*change))
    number = {"abc abcd abc": 2, "hello hello hello\n": 1}[change[0]]
    assert decode(*RESUME).sentence == (
        f"resume=true: the row 'prompts.txt:{number}' in out has a prompt that the data no longer holds; bring the old "
        f"data back, or start again with overwrite=true or another output_dir"
    )


WHOLE = {
    "id": "x", "prompt": "y", "text": "z", "token_ids": [4], "finish_reason": "length", "num_prompt_tokens": 1,
    "num_steps": 1, "acceptance_length": 1.0,
}  # fmt: skip


def changed(**fields: object) -> str:
    return json.dumps(WHOLE | fields)


def without(name: str) -> str:
    return json.dumps({key: value for key, value in WHOLE.items() if key != name})


@looped(
    "line, wrong",
    [
        ("oops", "it is not JSON"),
        ("[" * 5000, "it is not JSON"),
        ("[1]", "it is no JSON object"),
        *((without(name), f"it has no {name}") for name in WHOLE),
        (changed(id=["x"]), 'its id cannot be ["x"]'),
        (changed(prompt=None), "its prompt cannot be null"),
        (changed(text=5), "its text cannot be 5"),
        (changed(token_ids=[]), "its token_ids cannot be []"),
        (changed(token_ids=[4, "5"]), 'its token_ids cannot be [4, "5"]'),
        (changed(finish_reason="tired"), 'its finish_reason cannot be "tired"'),
        (changed(num_steps="1"), 'its num_steps cannot be "1"'),
        (changed(acceptance_length=None), "its acceptance_length cannot be null"),
        (changed(sample=-1), "its sample cannot be -1"),
    ],
)
def test_a_line_that_is_no_row(line: str, wrong: str, work: Path) -> None:
    path = work / "generations.jsonl"
    path.write_text(f"{json.dumps(WHOLE)}\n{line}\n")
    with pytest.raises(OutputError) as raised:
        OutputFolder(work, resume=True)
    assert str(raised.value) == (
        f"resume=true: {path}:2 is no row: {wrong}; take that line out, and its row is made again, "
        f"or start again with overwrite=true"
    )
    path.write_text(f"{json.dumps(WHOLE)}\n{changed(id='2', text=None)}\n")
    with OutputFolder(work, resume=True) as output:
        assert output.finished == {("x", 0): "y", ("2", 0): "y"}


@looped(
    "config, why",
    [
        (b"model: [1", "it is no YAML of options: while parsing a flow sequence"),
        (b"model: ${nothing}", "it is no YAML of options: Interpolation key 'nothing' not found"),
        (b"", "it holds no options"),
        (b"- 1", "it is no YAML of options: Index 'model' (str) is not an int"),
        (b"\xff", "it is no UTF-8 text"),
        (None, "No such file or directory"),
        ("pipe", "it holds no options"),
    ],
)
def test_rows_whose_config_is_broken(config: Any, why: str, decode: Callable, work: Path) -> None:
    folder = work / "out"
    if not folder.exists():
        decode()
    (folder / "config.yaml").unlink(missing_ok=True)
    if config == "pipe":
        os.mkfifo(folder / "config.yaml")
    elif config is not None:
        (folder / "config.yaml").write_bytes(config)
    assert decode(*RESUME).sentence == (
        f"resume=true: out holds rows, but its config.yaml cannot be read ({why}), which tells how they were made; "
        f"overwrite=true starts again"
    )


def test_a_tilde_is_the_users_own_folder(decode: Callable, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(work / "home"))
    decode("output_dir=~/deep/er", "data.limit=1")
    assert len(jsonl(work / "home" / "deep" / "er" / "generations.jsonl")) == 1


def test_rows_are_not_overwritten_unless_asked(decode: Callable) -> None:
    folder = decode().folder
    before = (folder / "generations.jsonl").read_text()
    sentence = (
        "output_dir=out holds the rows of an earlier run; resume=true goes on with it, overwrite=true replaces it, "
        "or set output_dir to another folder"
    )
    assert decode("overwrite=false").sentence == sentence
    assert (folder / "generations.jsonl").read_text() == before
    assert len(decode("data.limit=2").rows) == 2


def test_two_runs_do_not_write_to_one_folder(decode: Callable, work: Path) -> None:
    pytest.importorskip("fcntl", reason="file locks are Unix")
    with OutputFolder(work / "out"):
        assert decode().sentence == (
            "output_dir=out is being written by another run; wait for it, or set output_dir to another folder"
        )
    assert decode().status == 0


def test_a_report_passes_over_a_job_whose_figures_were_lost(decode: Callable, work: Path) -> None:
    decode("output_dir=out/0", "data.limit=1")
    decode("output_dir=out/1", "data.limit=1")
    (work / "out" / "1" / "metrics.json").unlink()  # the disk was full, say
    assert decode(*RESUME, "output_dir=out/1", "data.limit=1").status == 0
    assert [*read([work / "out"]).runs] == [str(work / "out" / "0")]
