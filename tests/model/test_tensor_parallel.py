"""Tensor parallel decoding, on two processes that torchrun starts: tokens, refusals, and a process that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from emssd_testing import tiny_model

from emssd import Engine
from emssd.cli.config import RunConfig, changed_options
from emssd.cli.jobs import Jobs
from emssd.data.sources import RandomConfig, random_prompts
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.hooks.registry import Registry
from emssd.model import ModelOptions, load_model
from emssd.model.hf.device_map import shards_of
from tests.cli.conftest import wait_for_rows
from tests.model.parallel_cases import MODELS, SAMPLING, cases, decoded, headed, preempted, save, save_perfect
from tests.support.tiers import looped

pytestmark = pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None, reason="two processes share a CPU only with a PyTorch for CPUs"
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMAND = [*TORCHRUN, "-m", "emssd"]
OPTIONS = ["model.tensor_parallel=true", "max_new_tokens=100", "ignore_eos=true", "batch_size=2", "progress=false"]
SECONDS = 180
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in MODELS:
        for seed in (0, 1):
            save(folder, name, seed=seed)
    save_perfect(folder)
    return folder


@pytest.fixture(scope="module")
def results(checkpoints: Path) -> dict[str, Any]:
    """The results of two processes."""
    command = [*TORCHRUN, "-m", "tests.model.parallel_cases", str(checkpoints)]
    run = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-5000:]
    decoded_by_two: dict[str, Any] = json.loads((checkpoints / "found.json").read_text())
    return decoded_by_two


@pytest.mark.torchrun
@pytest.mark.parametrize("model", MODELS)
def test_two_processes_give_the_tokens_of_one(model: str, checkpoints: Path, results: dict[str, Any]) -> None:
    loaded = load_model(ModelOptions(str(checkpoints / f"{model}-0"), compile=False))
    alone = {name: decoded(loaded, "none", "ragged", params) for name, params in SAMPLING.items()}
    expected = {f"{model} {name} {backend} {how}": alone[how] for name, backend, how in cases(model)}
    assert {name: tokens for name, tokens in results["tokens"].items() if name.startswith(f"{model} ")} == expected


@pytest.mark.torchrun
@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_a_head_drafts_as_well_for_a_spread_target(name: str, checkpoints: Path, results: dict[str, Any]) -> None:
    alone = headed(load_model(ModelOptions(str(checkpoints / "perfect"), compile=False)), name, checkpoints)
    assert results["headed"][name] == alone
    assert max(alone["accepted"]) > 3, "the head is perfect"


@pytest.mark.torchrun
def test_rows_that_lose_their_kv_begin_again_in_every_process(checkpoints: Path, results: dict[str, Any]) -> None:
    alone, num_preempted = preempted(load_model(ModelOptions(str(checkpoints / "llama-0"), compile=False)), "1MiB")
    tokens, num_preempted_spread = results["preempted"]
    assert (tokens, num_preempted) == (alone, 0)
    assert num_preempted_spread > 0, "there was room for all rows"


@pytest.mark.torchrun
def test_each_process_holds_its_heads_and_refuses_what_needs_all(results: dict[str, Any]) -> None:
    messages = results["messages"]
    assert results["heads"]["opt"] == [2, 2], "each of its layers has four heads"
    assert results["heads"]["granitemoe_swa"] == [1, 1], "each of its layers has two of keys and values"
    assert "there is no such folder" in messages["missing"]
    assert messages["unreadable"] == "process 1 cannot do what process 0 can: there is no such folder here"
    assert "no drafter rounds the weights of the target" in messages["borrowed"]
    assert "Engine.from_pretrained(path, tensor_parallel=True)" in messages["shard"]


@pytest.mark.torchrun
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_others_and_finished_rows_are_kept(
    rank: int, checkpoints: Path, tmp_path: Path
) -> None:
    job = tmp_path / "job"
    options = [*OPTIONS, f"model.path={checkpoints / 'llama-0'}", f"output_dir={job}", "data=random", "data.limit=4000",
               "data.num_tokens=16", "data.vocab_size=13"]  # fmt: skip
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        wait_for_rows(job / "generations.jsonl", 2, run)
        workers = psutil.Process(run.pid).children()
        (worker,) = (child.pid for child in workers if child.environ().get("RANK") == str(rank))
        os.kill(worker, signal.SIGKILL)
        output, _ = run.communicate(timeout=SECONDS)
    assert run.returncode != 0
    assert "another process of this tensor parallel run has ended" in output
    assert f"resume=true output_dir={job} goes on from there" in output
    assert "Traceback" not in output.partition("torch/distributed")[0], output
    rows = [json.loads(line) for line in (job / "generations.jsonl").read_text().splitlines()]
    prompts = random_prompts(RandomConfig(limit=4000, num_tokens=16, vocab_size=13))
    kept = {prompt.prompt_id: prompt.token_ids for prompt in prompts}
    engine = Engine.from_pretrained(str(checkpoints / "llama-0"), drafter="none")
    alone = engine.generate([kept[row["id"]] for row in rows], max_new_tokens=100, ignore_eos=True)
    assert [row["token_ids"] for row in rows] == [list(row.token_ids) for row in alone]


@pytest.mark.torchrun
def test_the_first_process_alone_reads_and_writes_and_a_job_goes_on_where_it_ended(
    checkpoints: Path, tmp_path: Path
) -> None:
    model, prompts, job = f"model.path={checkpoints / 'llama-0'}", tmp_path / "prompts.jsonl", tmp_path / "job"
    lines = [json.dumps({"prompt": text}) for text in ("w4", "", "w6", "w7")]
    prompts.write_text("\n".join(lines))

    def run(command: list[str], *options: str) -> str:
        command = [*command, *OPTIONS, model, "data=jsonl", "on_error=skip", *options]
        done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def tokens(rows: str) -> list[list[int]]:
        rows_by_id = {row["id"]: row["token_ids"] for row in map(json.loads, rows.splitlines())}
        return [rows_by_id[name] for name in sorted(rows_by_id)]

    streamed = run(COMMAND, "data.path=-", "output_dir=-")
    run(COMMAND, f"data.path={prompts}", f"output_dir={job}", "check=plain")
    file = job / "generations.jsonl"
    whole = file.read_text()
    file.write_text(whole.splitlines(keepends=True)[0])
    run(COMMAND, f"data.path={prompts}", f"output_dir={job}", "resume=true")
    alone = Engine.from_pretrained(str(checkpoints / "llama-0"), drafter="none")
    rows = alone.generate([[4], [6], [7]], max_new_tokens=100, ignore_eos=True)
    expected = [[*row.token_ids] for row in rows]
    assert [tokens(text) for text in (streamed, whole, file.read_text())] == [expected] * 3


@looped(
    ("architecture", "options", "size", "message"),
    [
        ("gpt2", {}, 2, "Transformers has no tensor parallel plan for it. Leave model.tensor_parallel out"),
        ("llama", {}, 4, "it has 4 query heads and 2 key heads, and each process has to get equally many; take 2 proc"),
        ("opt", {"num_attention_heads": 3, "hidden_size": 36}, 2, "take 3 processes"),
        ("llama", {"num_key_value_heads": 1}, 2, "run it on one device"),
    ],
)
def test_what_cannot_be_spread_is_refused(architecture: str, options: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        shards_of(tiny_model(architecture, **options).config, size)
    assert message in str(caught.value)


@looped(
    ("options", "message"),
    [
        ({"compile": True}, "model.compile=true is for a whole model in one process"),
        ({"device": "cuda:1"}, "every process takes its own"),
        ({}, "torchrun --nproc-per-node 2 -m emssd"),
    ],
)
def test_options_that_cannot_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model(ModelOptions("demo", **{"tensor_parallel": True} | options))
    assert message in str(caught.value)


def test_a_job_may_go_on_with_other_processes() -> None:
    alone = "model:\n  path: DIR\n"
    spread = f"{alone}  tensor_parallel: true\n"
    assert changed_options(alone, spread) == []
    assert changed_options(alone, spread.replace("DIR", "OTHER")) == ["model.path"]


def test_processes_that_would_all_decode_everything_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with closing(Jobs(Registry())) as jobs, pytest.raises(ConfigError, match=r"add model\.tensor_parallel=true"):
        jobs.run(RunConfig(), "", Path("nowhere"))


def test_a_model_on_several_devices_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match=r"on several devices \(cpu, meta\), and nothing moves what they"):
        Engine.from_model(model, drafter="none")


@pytest.mark.torchrun
def test_the_example_prints_what_one_process_says() -> None:
    demo = str(ROOT / "emssd" / "data" / "demo" / "weights" / "target")
    run = subprocess.run(
        [*TORCHRUN[:-1], "3", str(ROOT / "examples" / "tensor_parallel.py"), demo],  # it has three heads
        timeout=SECONDS, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (alone,) = Engine.from_pretrained(demo, drafter="none").generate(["One, two, three, one, two,"], max_new_tokens=24)
    assert alone.text in run.stdout
