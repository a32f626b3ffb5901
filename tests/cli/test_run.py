"""A run of the command line: what it writes, measures and imports, and that each way to decode gives the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from emssd import __version__
from emssd.__main__ import _spin_briefly
from emssd.cli import job, provenance
from emssd.cli.config import RunConfig
from emssd.cli.intake import most_steps
from emssd.data.prompts import Prompt
from emssd.errors import OutOfMemoryError
from emssd.model.load.checkpoint import _MadeEmpty

from .conftest import drafter

RETRIEVE = ("drafter=llma", "drafter.search=prompt_and_output", "drafter.copy_length=3")


def test_a_run_writes_a_line_per_prompt_metrics_and_the_config(decode: Callable) -> None:
    result = decode()
    metrics = result.metrics
    assert {row["id"] for row in result.rows} == {f"prompts.txt:{line}" for line in (1, 2, 4, 5, 6)}
    by_id = {row["id"]: row for row in result.rows}
    assert by_id["prompts.txt:4"]["prompt"] == "round and round"
    assert {row["finish_reason"] for row in result.rows} == {"eos", "length"}
    for row in result.rows:
        assert isinstance(row["text"], str)
        assert row["num_prompt_tokens"] == len(row["prompt"])  # the tokenizer's tokens are bytes
        assert (len(row["token_ids"]) == 24) == (row["finish_reason"] == "length")
        assert (row["token_ids"][-1] == 2) == (row["finish_reason"] == "eos")
        assert row["acceptance_length"] >= 1
    assert metrics["num_prompts"] == 5
    assert metrics["num_new_tokens"] == sum(len(row["token_ids"]) for row in result.rows)
    config = OmegaConf.load(result.folder / "config.yaml")
    assert (config.drafter.name, config.batch_size, config.max_new_tokens) == ("suffix", 3, 24)
    assert result.files.keys() == {"config.yaml", "generations.jsonl", "metrics.json"}


def test_the_table_shows_the_numbers_of_the_metrics_file(decode: Callable) -> None:
    result = decode(*RETRIEVE, "check=greedy", "details=true")
    metrics, greedy = result.metrics, result.metrics["greedy"]
    interval = "{:.2f}–{:.2f}".format(*metrics["speedup_interval"])
    assert [line for line in result.out.splitlines() if line.startswith("  ")][:3] == [
        f"  {metrics['decode_tokens_per_second']:.1f} tokens/s, without the time for prompts",
        f"  {metrics['speedup']:.2f}× ({interval}) the speed without drafts",
        f"  τ {metrics['mean_acceptance_length']:.2f}: new tokens of a sequence in a step of the model",
    ]
    table = {}
    for line in result.out.splitlines():
        if line.startswith("│"):
            label, *cells = (cell.strip() for cell in line.strip("│").split("│"))
            table[label] = cells
    for name in ("draft_acceptance_rate", "padding_ratio", "num_steps", "num_new_tokens", "kv_peak_bytes"):
        assert table[name] == [f"{metrics[name]:,.5g}", f"{greedy[name]:,.5g}"]
    assert [name for name in table if name.startswith("seconds.")] == [f"seconds.{name}" for name in metrics["seconds"]]
    assert not any("│" in line for line in decode(*RETRIEVE).out.splitlines())


@pytest.mark.parametrize(
    "choice",
    [
        ["drafter=none"],
        [*RETRIEVE],
        ["drafter=llma_original", "drafter.search=prompt_and_output"],
        [*RETRIEVE, "batch_size=1"],
        [*RETRIEVE, "batch_size=8", "ignore_eos=true"],
        *([*RETRIEVE, f"backend={cell}"] for cell in ("padded", "unpad_kv", "unpad_inputs", "unpad_both")),
    ],
    ids=" ".join,
)
def test_every_way_to_decode_gives_the_tokens_of_plain_greedy(choice: list[str], decode: Callable) -> None:
    metrics = decode(*choice, "check=greedy", "budget=fixed").metrics  # the adaptive one looks at the clock
    assert metrics["check"] == {"exact": 5, "ties": 0, "differences": 0, "details": []}
    if choice != ["drafter=none"]:
        assert metrics["num_accepted_tokens"] > 0  # else the comparison would say little


def test_a_model_without_eos_runs_to_the_limit_with_a_note(decode: Callable, model_without_eos: str) -> None:
    result = decode(f"model.path={model_without_eos}")
    assert {row["finish_reason"] for row in result.rows} == {"length"}
    assert "the model names no EOS token: only max_new_tokens ends a row" in result.err


def test_threads_of_one_job_are_not_those_of_the_next(decode: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emssd.cli.job._own_threads", lambda: 2)
    before = torch.get_num_threads()
    try:
        result = decode("-m", "num_threads=1,null", "max_new_tokens=2", "data.limit=1")
    finally:
        torch.set_num_threads(before)
    written = [json.loads((result.folder / name / "metrics.json").read_text()) for name in ("0", "1")]
    assert [metrics["hardware"]["threads"] for metrics in written] == [1, 2]


def test_an_earlier_runs_metrics_do_not_stay_beside_new_rows(decode: Callable, fail_at: Callable) -> None:
    assert decode().metrics
    fail_at(35, OutOfMemoryError("out of memory"))
    result = decode("batch_size=1", "drafter=none")
    assert result.sentence == "out of memory"
    assert "metrics.json" not in result.files
    assert 0 < len(result.rows) < 5


@pytest.mark.parametrize("there", [[], ["deep"], ["deep", "deep/er"]], ids=len)
def test_a_run_that_fails_before_its_first_row_leaves_no_folder_that_it_made(
    there: list[str], decode: Callable, work: Path, fail_at: Callable
) -> None:
    for folder in there:
        (work / folder).mkdir()
    before = sorted(work.rglob("*"))
    fail_at(3, OutOfMemoryError("out of memory"))
    assert decode("output_dir=deep/er").sentence == "out of memory"
    assert sorted(work.rglob("*")) == before


@pytest.mark.parametrize(
    ("limits", "batch_size", "steps"),
    [([30], 8, 30), ([30] * 9, 8, 60), ([4, 4, 30, 4], 2, 34), ([5, 10**400], 2, 96), ([], 8, 0)],
)
def test_each_row_begins_where_the_first_one_ends(limits: list[int], batch_size: int, steps: int) -> None:
    """So many steps a run has to do at most, by which ``model.compile=auto`` decides."""
    prompts = [Prompt(str(number), max_new_tokens=limit) for number, limit in enumerate(limits)]
    assert most_steps(RunConfig(batch_size=batch_size), prompts, 96) == steps


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The events, in order: a measurement is quick here, and takes as many seconds as there are threads."""
    happened: list[str] = []
    assemble = job.Engine.assemble

    def best_seconds(*_: Any) -> float:
        happened.append("measured")
        return float(torch.get_num_threads())

    def assembled(*arguments: Any, **options: Any) -> Any:
        happened.append("engine")
        return assemble(*arguments, **options)

    monkeypatch.setattr(provenance, "_best_seconds", best_seconds)
    monkeypatch.setattr(job.Engine, "assemble", assembled)
    provenance._measured_rates.cache_clear()
    yield happened
    provenance._measured_rates.cache_clear()


def test_rates_are_measured_before_an_engine_takes_the_memory(measured: list[str], decode: Callable) -> None:
    small = "size=toy", "method=greedy,vanilla", "data.limit=1", "max_new_tokens=1", "batch_size=1"
    result = decode("-m", "experiment=fig1", *small)
    assert result.status == 0, result.err
    assert measured == ["measured", "measured", "engine", "engine"]


def test_metrics_say_which_plugins_of_which_versions_ran(install: Callable, decode: Callable) -> None:
    install("good", drafter())
    metrics = decode("drafter=third", "check=greedy").metrics
    ours = {"distribution": "emssd", "version": __version__}
    beside = [{"kind": "backend", "name": "ragged"} | ours, {"kind": "budget", "name": "adaptive"} | ours,
              {"kind": "data", "name": "text"} | ours]  # fmt: skip
    third = {"kind": "drafter", "name": "third", "distribution": "third-party-good", "version": "1.2"}
    assert metrics["plugins"] == [third, *beside]


def test_drafters_that_another_combines_are_among_them_and_those_of_earlier_runs_are_not(decode: Callable) -> None:
    result = decode("-m", "drafter=cascade", "drafter.drafters=[llma,pld],[pld,none]", "max_new_tokens=2")
    assert result.status == 0, result.err
    kept = [json.loads((result.folder / number / "metrics.json").read_text())["plugins"] for number in "01"]
    names = [{plugin["name"] for plugin in used if plugin["kind"] == "drafter"} for used in kept]
    assert names == [{"cascade", "llma", "pld"}, {"cascade", "pld", "none"}]


# What only training, data frames and plots need. Not Dynamo and `accelerate`: Transformers imports them.
HEAVY = (
    "scipy",
    "pandas",
    "matplotlib",
    "sklearn",
    "torchvision",
    "transformers.trainer",
    "emssd_heads.training",
)
PROGRAM = """
import json, os, sys
from emssd.__main__ import main

assert "torch" not in sys.modules  # libgomp reads the environment when torch is imported
main()
assert {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)
with open("modules.json", "w") as file:
    json.dump(sorted(sys.modules), file)
"""


@pytest.mark.costly("a process of its own")
def test_heavy_modules_are_not_imported_by_a_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "data.limit=1", "max_new_tokens=2", "progress=false"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    modules = json.loads((tmp_path / "modules.json").read_text())
    assert "emssd.decoding.engine" in modules
    assert [name for name in HEAVY if name in modules] == []


def test_a_path_without_a_model_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    program = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
    command = [sys.executable, "-c", f"{program}from emssd.__main__ import main; main()", f"model.path={tmp_path}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert f"cannot load the model '{tmp_path}': there is no config.json in it" in done.stderr


@pytest.mark.parametrize(
    ("mine", "then"), [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_threads_spin_briefly_unless_the_environment_says_how(
    mine: dict[str, str], then: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(mine))
    _spin_briefly()
    assert os.environ.get("GOMP_SPINCOUNT") == then


def test_numbers_for_tensors_without_memory_are_left_out() -> None:
    with _MadeEmpty():
        there, absent = torch.nn.Embedding(2, 3), torch.nn.Embedding(2, 3, device="meta")
    assert absent.weight.is_meta
    assert there.weight.std() > 0
