"""Tensor parallel decoding, on two processes that torchrun starts: tokens, refusals, and a process that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from emssd import Engine
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.model import load_model
from emssd.model.parallel.plans import check_shards
from emssd.testing import tiny_model
from tests.parallel.cases import MODELS, SAMPLING, cases, decoded, save

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SECONDS = 180


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in MODELS:
        for seed in (0, 1):
            save(folder, name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def found(checkpoints: Path) -> dict[str, Any]:
    """What two processes did."""
    run = subprocess.run(
        [*TORCHRUN, "-m", "tests.parallel.worker", str(checkpoints)], timeout=SECONDS, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-5000:]
    result: dict[str, Any] = json.loads((checkpoints / "found.json").read_text())
    return result


@pytest.mark.slow  # two processes start, which takes most of the time
@pytest.mark.parametrize("model", MODELS)
def test_two_processes_give_the_tokens_of_one(model: str, checkpoints: Path, found: dict[str, Any]) -> None:
    loaded = load_model(str(checkpoints / f"{model}-0"))
    alone = {name: decoded(loaded, "none", "ragged", params) for name, params in SAMPLING.items()}
    expected = {f"{model} {name} {backend} {how}": alone[how] for name, backend, how in cases(model)}
    assert {name: tokens for name, tokens in found["tokens"].items() if name.startswith(f"{model} ")} == expected


@pytest.mark.slow  # as above, with the same two processes
def test_each_process_holds_its_heads_and_refuses_what_needs_all(found: dict[str, Any]) -> None:
    said = found["said"]
    assert found["heads"] == [2], "OPT has four"
    assert "process 1 was told something else than process 0" in said["told"]
    assert "process 1 has computed other hidden states than process 0" in said["computed"]
    assert "there is no such folder" in said["missing"]
    assert "no drafter reads hidden states of the target or borrows of its weights" in said["borrowed"]
    assert "Engine.from_pretrained(path, tensor_parallel=True)" in said["shard"]


@pytest.mark.slow  # two processes start, one is killed, and one process goes on
def test_a_killed_process_ends_the_others_and_finished_rows_are_kept(checkpoints: Path, tmp_path: Path) -> None:
    job = tmp_path / "job"
    options = [
        f"model.path={checkpoints / 'llama-0'}", "data=random", "data.num_tokens=16", "data.vocab_size=13",
        "ignore_eos=true", "batch_size=2", "progress=false", f"output_dir={job}",
    ]  # fmt: skip
    many = ["data.limit=4000", "max_new_tokens=100"]
    command = [*TORCHRUN, "-m", "emssd", *options, *many, "model.tensor_parallel=true"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        _wait_for(job / "generations.jsonl")
        os.kill(_process_of(run.pid, rank=1), signal.SIGKILL)
        output, _ = run.communicate(timeout=30)
    assert run.returncode != 0
    assert "another process of this tensor parallel run has ended" in output
    assert f"resume=true output_dir={job} goes on from there" in output
    assert "Traceback" not in output.partition("torch/distributed")[0], output
    kept = (job / "generations.jsonl").read_text().splitlines()
    rows = {row["id"]: row for row in map(json.loads, kept)}
    again = [*options, f"data.limit={len(kept) + 2}", "max_new_tokens=100", "resume=true"]
    alone = subprocess.run([sys.executable, "-m", "emssd", *again], timeout=SECONDS, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    after = {row["id"]: row for row in map(json.loads, (job / "generations.jsonl").read_text().splitlines())}
    assert rows.items() <= after.items()
    assert len(after) >= len(kept) + 2


def _wait_for(rows: Path) -> None:
    """Until some rows are finished."""
    end = time.monotonic() + SECONDS
    while not rows.is_file() or rows.read_text().count("\n") < 2:
        assert time.monotonic() < end, "no row was finished"
        time.sleep(0.05)


def _process_of(parent: int, rank: int) -> int:
    import psutil

    for child in psutil.Process(parent).children():
        if child.environ().get("RANK") == str(rank):
            return child.pid
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.parametrize(
    ("architecture", "options", "size", "said"),
    [
        ("gpt2", {}, 2, "Transformers has no tensor parallel plan for it. Leave model.tensor_parallel out"),
        ("llama", {}, 4, "it has 4 query heads and 2 key heads, and each process has to get equally many; take 2 proc"),
        ("opt", {"num_attention_heads": 3, "hidden_size": 36}, 2, "take 3 processes"),
        ("llama", {"num_key_value_heads": 1}, 2, "run it on one device"),
    ],
)
def test_what_cannot_be_spread_is_refused(architecture: str, options: dict[str, Any], size: int, said: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        check_shards(tiny_model(architecture, **options).config, size)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compile": True}, "model.compile compiles a whole model"),
        ({"device": "cuda:1"}, "every process takes its own"),
        ({}, "torchrun --nproc-per-node 2 -m emssd"),
        ({"tensor_parallel": False, "checksums": True}, "model.checksums compares the processes"),
    ],
)
def test_options_that_cannot_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model("demo", **{"tensor_parallel": True} | options)
    assert said in str(caught.value)


def test_a_model_on_several_devices_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head.to("meta")
    with pytest.raises(
        UnsupportedModelError, match=r"on several devices \(cpu, meta\), and emssd keeps the KV cache on"
    ):
        Engine.from_model(model, drafter="none")
