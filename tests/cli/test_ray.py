"""``cluster=ray`` and `TextGenerator` on a Ray of this machine: every row once, whatever dies; run by nox -s ray."""

from __future__ import annotations

import json
import runpy
import signal
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import psutil
import pytest

from emssd.integrations import installed
from tests.support.tiers import looped

from .conftest import jsonl, wait_for_rows

ROOT = Path(__file__).resolve().parents[2]
WHY = "Ray is not installed: nox -s ray, or pip install 'emssd[ray]'"
NUM_PROMPTS = 40


@pytest.fixture
def ray() -> Any:
    return pytest.importorskip("ray", reason=WHY)


@pytest.fixture
def many(work: Path, model: str) -> list[str]:
    """Options of a job that takes some seconds."""
    lines = [json.dumps({"id": f"p{n}", "prompt": f"{n} round and {n} round"}) for n in range(NUM_PROMPTS)]
    (work / "many.jsonl").write_text("".join(f"{line}\n" for line in lines))
    data = ["data=jsonl", "data.path=many.jsonl", "data.id_field=id"]
    return [f"model.path={model}", *data, "max_new_tokens=60", "ignore_eos=true", "batch_size=2", "progress=false"]


def workers_of(process: Any) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    return [each for each in found if any("ray::" in word and "_Worker" in word for word in each.cmdline())]


@pytest.mark.nightly
def test_every_row_is_there_once_whatever_dies(
    ray: Any, emssd: Callable, start: Callable, many: list[str], work: Path
) -> None:
    on_ray = [*many, "cluster=ray", "cluster.workers=2", "cluster.prompts_per_task=2", "output_dir=out", "resume=true"]
    path = work / "out" / "generations.jsonl"
    first = start(*on_ray)
    wait_for_rows(path, 2, first)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=120)
    assert first.returncode == 130, err
    assert "resume=true output_dir=out goes on from there" in err
    kept = len(jsonl(path))
    assert 2 <= kept < NUM_PROMPTS

    second = start(*on_ray)
    wait_for_rows(path, kept + 2, second)
    pair = workers_of(second)
    assert len(pair) == 2
    pair[0].kill()
    assert len(jsonl(path)) < NUM_PROMPTS
    out, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    assert not pair[0].is_running()
    assert "on 2 workers" in out
    assert f"{kept} of {NUM_PROMPTS} rows" in err

    again = emssd(*many, "output_dir=out", "resume=true")
    assert "nothing is left to do" in again.err
    assert (again.metrics["num_prompts"], again.metrics["num_resumed_prompts"]) == (NUM_PROMPTS, kept)
    there = again.tokens
    assert len(there) == NUM_PROMPTS
    assert emssd(*many, "drafter=none", "output_dir=out", "overwrite=true").tokens == there


@pytest.mark.nightly
def test_a_batch_file_is_answered_with_its_errors(ray: Any, emssd: Callable, model: str, work: Path) -> None:
    body = {"prompt": "abc", "max_tokens": 6, "temperature": 0.9, "n": 2}
    bodies = {"a": body, "b": body | {"tools": [1]}, "c": body | {"prompt": "x" * 200}, "d": body}
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": bodies[name]} for name in bodies]
    (work / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = [f"model.path={model}", "data=openai_batch", "data.path=r.jsonl", "progress=false"]

    def answers(folder: str) -> dict[str, Any]:
        found = jsonl(work / folder / "batch_output.jsonl")
        for each in found:
            each["response"]["body"].pop("created", None)
        return {each["custom_id"]: each for each in found}

    assert emssd(*options, "cluster=ray", "cluster.workers=1", "output_dir=one").status == 0
    assert emssd(*options, "output_dir=two").status == 0
    assert answers("one") == answers("two")
    assert [answers("one")[name]["response"]["status_code"] for name in "abcd"] == [200, 400, 400, 200]
    missing = emssd("model.path=nowhere", "cluster=ray", "cluster.workers=1", "output_dir=three", "data.limit=1")
    assert "nowhere" in missing.sentence
    assert not (work / "three").exists()


@pytest.mark.nightly
def test_the_example_writes_parquet(ray: Any, work: Path) -> None:
    runpy.run_path(str(ROOT / "examples" / "ray_data.py"))
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(work / "texts").to_pylist()
    assert sorted(row["id"] for row in table) == list(range(8))
    assert all(row["generated_text"] for row in table)


def test_without_ray_the_run_says_what_to_install(decode: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installed, "version", missing)
    assert decode("cluster=ray").sentence == (
        "cluster=ray needs Ray Data: pip install 'emssd[ray]', on all machines of the cluster"
    )


@looped(
    "option, sentence",
    [
        ("cluster.workers=0", "cluster.workers is 0; it must be at least 1"),
        ("cluster.prompts_per_task=0", "cluster.prompts_per_task is 0; it must be at least 1"),
        ("cluster.cpus=0", "cluster.cpus is 0.0 and cluster.gpus 0.0; a worker needs some of the first"),
        ("check=plain", "check compares runs of one process; leave check= or cluster= out"),
    ],
)
def test_options_that_cannot_be(option: str, sentence: str, decode: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda name: "2.60.0")  # they are refused before Ray is imported
    assert sentence in decode("cluster=ray", option).sentence


def test_where_no_prompt_can_be_read_a_file_says_why(
    decode: Callable, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "version", lambda name: "2.60.0")  # nothing is left for Ray to do
    prompts.write_text("{oops\n")
    result = decode("cluster=ray", "data=jsonl", "on_error=skip")
    assert result.sentence == "none of the 1 prompts can be used; out/errors.jsonl says why"
    assert "prompts.txt:1 is not JSON" in result.errors["prompts.txt:1"]
