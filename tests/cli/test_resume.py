"""A resumed job keeps no row that would be made otherwise now, and a run whose rows were taken away says so."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emssd_testing.models import tiny_model
from safetensors.torch import save_file

from emssd.cli.lines_file import LinesFile
from emssd.cli.output import OutputFolder
from emssd.errors import CompileError, OutputError
from emssd.model.compile import compilable, tracing
from emssd.model.load.checkpoint_files import content_digest
from emssd.sequences import Generation

from .conftest import RESUME, fenced, jsonl


@pytest.fixture
def own_model(model: str, work: Path) -> Path:
    """The tiny model in a folder that a test may change."""
    return Path(shutil.copytree(model, work / "model"))


@pytest.fixture
def half(decode: Callable, own_model: Path) -> Callable[..., Any]:
    """``half(*arguments)`` decodes all prompts but one, for ``resume`` to go on with."""

    def run(*arguments: object) -> Any:
        return decode(f"model.path={own_model}", "drafter=none", *arguments)

    run("data.limit=2")
    return run


OTHER_FILES = (
    "resume=true: the rows in out were made when the files of model.path={} held something else; bring the old ones "
    "back, or start again with overwrite=true or another output_dir"
)


def test_rows_of_other_weights_at_the_same_place_are_not_mixed(half: Callable, own_model: Path) -> None:
    file = own_model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # one bit of one weight, the last one
    file.write_bytes(content)
    assert half(*RESUME).sentence == OTHER_FILES.format(own_model)
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(5, 5))
    (own_model / "optimizer.pt").write_bytes(b"nothing that a run reads")
    again = half(*RESUME)
    assert len(again.rows) == 5
    assert "model were written again since rows in out were made" in " ".join(again.err.split())


def test_rows_of_another_chat_template_are_not_mixed(half: Callable, own_model: Path) -> None:
    (own_model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert half(*RESUME).sentence == OTHER_FILES.format(own_model)
    (own_model / "chat_template.jinja").unlink()
    assert half(*RESUME).status == 0


@pytest.mark.parametrize(
    "change",
    [{"n": 9}, {"how": {"temperature": 0.5}}, {"how": {"temperature": 1.0, "seed": 4, "logit_bias": {"9": 1}}}],
    ids=str,
)
def test_rows_that_were_asked_for_otherwise_are_not_mixed(change: dict[str, Any], decode_records: Callable) -> None:
    first = {"id": "a", "prompt": "abc", "n": 8, "how": {"temperature": 1, "seed": 4}}
    options = ("data.id_field=id", "data.max_new_tokens_field=n", "data.sampling_field=how", "drafter=none")

    def run(record: dict[str, Any], *arguments: str) -> Any:
        return decode_records([record, record | {"id": "b"}], *options, *arguments)

    assert run(first, "data.limit=1").status == 0
    assert run(first | change, "resume=true").sentence == (
        "resume=true: the row 'a' in out was made with another limit, other sampling or other stop strings of its own "
        "than the data holds; bring the old data back, or start again with overwrite=true or another output_dir"
    )
    same = first | {"how": {"seed": 4, "temperature": 1.0, "top_k": None}}
    assert len(run(same, "resume=true").rows) == 2


def test_rows_of_an_earlier_version_are_kept(half: Callable, work: Path) -> None:
    path = work / "out" / "generations.jsonl"
    rows = jsonl(path)
    assert all(row.pop("made_with").keys() == {"files", "written", "compiled", "request"} for row in rows)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert len(half(*RESUME).rows) == 5


def test_a_resumed_run_is_compiled_if_and_only_if_the_rows_before_it_were(
    half: Callable, work: Path, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_compiled_jobs` resumes one that is."""
    monkeypatch.setattr(compilable, "_PAYS", 0)  # so that each run is worth it
    monkeypatch.setattr(tracing, "compile_program", lambda *arguments: pytest.fail("it compiles"))
    monkeypatch.setenv("EMSSD_CACHE", str(work / "cache"))
    auto, path = (*RESUME, "model.compile=auto"), work / "out" / "generations.jsonl"

    def made_by(compiled: bool) -> None:
        rows = [row | {"made_with": row["made_with"] | {"compiled": compiled}} for row in jsonl(path)[:2]]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    made_by(compiled=False)
    assert half(*auto).metrics["compiled"] == "not compiled, as the rows that are there were made"
    made_by(compiled=True)
    monkeypatch.setattr(tracing, "compile_program", Mock(side_effect=CompileError("it is asked to compile")))
    assert half(*auto).sentence == (
        "resume=true: a compiled program made the rows in out, and this run has none (not compiled: it is asked to "
        "compile); go on where the model can be compiled, or start again with overwrite=true or another output_dir"
    )


def _replaced(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


WAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "removed": (Path.unlink, "is no longer there"),
    "folder removed": (lambda path: shutil.rmtree(path.parent), "is no longer there"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 9), "was cut short"),
    "grown": (lambda path: os.truncate(path, path.stat().st_size + 9), "has grown"),
    "replaced": (_replaced, "is no longer there"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_something_else_changes_takes_no_more_lines(way: str, tmp_path: Path) -> None:
    spoil, message = WAYS[way]
    lines = LinesFile(tmp_path / "out" / "rows.jsonl")
    lines.append(b"first of all\n")
    spoil(lines.path)
    left = lines.path.read_bytes() if lines.path.exists() else None
    for change in (lines.check, lambda: lines.append(b"second\n")):
        with pytest.raises(OutputError, match=f"rows.jsonl {message}, and not by this run"):
            change()
    lines.close()
    assert (lines.path.read_bytes() if lines.path.exists() else None) == left


@pytest.mark.parametrize(("way", "number"), [("removed", 2), ("cut", 5)])
def test_rows_that_are_taken_away_during_a_run_end_it(
    way: str, number: int, half: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, message = WAYS[way]
    write, seen = OutputFolder.write_generation, list[Generation]()

    def spoiled(self: OutputFolder, prompt: Any, generation: Generation) -> None:
        write(self, prompt, generation)
        seen.append(generation)
        if len(seen) == number:
            spoil(self.path / "generations.jsonl")

    with monkeypatch.context() as patched:
        patched.setattr(OutputFolder, "write_generation", spoiled)
        result = half()
    assert result.sentence == (
        f"out/generations.jsonl {message}, and not by this run, so that rows may be lost; resume=true makes those "
        f"anew that are missing"
    )
    assert not (result.folder / "metrics.json").exists()
    assert {row["id"] for row in half(*RESUME).rows} == {f"prompts.txt:{line}" for line in (1, 2, 4, 5, 6)}


def num_bytes_read() -> int:
    """By this process so far, beside what is mapped into memory."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_digest_tells_other_weights_by_their_header_or_a_piece(tmp_path: Path) -> None:
    file, digests = tmp_path / "model.safetensors", set[str]()
    for name, value in (("x", 0.0), ("y", 0.0), ("x", 1.0)):
        layers = {f"layer.{number}": torch.full((2**13,), value) for number in range(128)}
        save_file(layers | {name: torch.ones(1)}, file)  # the last name is not in the first piece
        os.utime(file, ns=(5, 5))
        before = num_bytes_read()
        digests.add(content_digest(file))
        assert num_bytes_read() - before < 2**20
    assert len(digests) == 3
    shutil.copyfile(file, tmp_path / "copy.safetensors")
    assert content_digest(tmp_path / "copy.safetensors") in digests


def test_a_run_reads_no_weights_but_to_load_them(decode: Callable, work: Path, own_model: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
    vocab_size = json.loads((own_model / "config.json").read_text())["vocab_size"]
    tiny_model("llama", vocab_size=vocab_size, dtype=torch.float32, **sizes).save_pretrained(own_model)
    run = (f"model.path={own_model}", "drafter=none", "max_new_tokens=2", "overwrite=true")
    decode(*run)
    before = num_bytes_read()
    decode(*run)
    assert num_bytes_read() - before < (own_model / "model.safetensors").stat().st_size / 2


@pytest.mark.parametrize("name", ["errors.jsonl", "metrics.json", "config.yaml", "generations.jsonl"])
def test_a_folder_or_a_pipe_in_the_place_of_a_file(name: str, half: Callable, work: Path) -> None:
    shutil.rmtree(work / "out")
    (work / "out").mkdir()
    if name != "generations.jsonl":
        (work / "out" / name).mkdir()
        assert f"out/{name}: Is a directory" in half().sentence
        return
    os.mkfifo(work / "out" / name)
    message = f"out/{name} is a pipe, and rows go to a file; take it away, or set output_dir to another"
    assert all(half(*more).sentence.startswith(message) for more in ((), RESUME))


@pytest.mark.parametrize("text", ["model: " + "[" * 10_000, "model: " + "{a: " * 500 + "1" + "}" * 500])
def test_a_config_that_is_nested_too_deeply(text: str, half: Callable, work: Path) -> None:
    (work / "out" / "config.yaml").write_text(text)
    assert "cannot be read (it is no YAML of options: its brackets are nested too deeply)" in half(*RESUME).sentence


LONG_JOBS = "long_jobs.md"


@pytest.mark.docs
def test_the_commands_of_the_page_on_long_jobs(emssd: Callable, work: Path) -> None:
    (records,) = fenced(LONG_JOBS, "json")
    (work / "questions.jsonl").write_text(f"{records}\n")
    commands = [shlex.split(line) for block in fenced(LONG_JOBS, "sh") for line in block.splitlines()]
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
