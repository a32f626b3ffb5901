"""Sweeps: the table at the end compares each run with its own plain run; launchers that experiments refuse."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from copy import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emssd_lab.experiment.sweep import _others, print_sweep
from emssd_lab.report.__main__ import main as report_main
from emssd_testing.models import tiny_model
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf
from rich.console import Console

from emssd.cli.config import RunConfig, conf_dir, register_configs
from emssd.cli.job import JobResult
from emssd.cli.jobs import SweptRun
from emssd.hooks.registry import Registry
from tests.support.tiers import only

from .conftest import byte_tokenizer, jsonl

PLAIN, SAME = "drafter=none", "batch_size=3"
SOME, EVERY = ["eagle3", "llma", "none", "rest"], Registry().names("drafter")
NEED_FILES = {"cascade", "dflash", "draft_model", "eagle", "eagle3", "hydra", "kangaroo", "medusa", "mtp", "pard",
              "replay", "rest", "union"}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def store() -> None:
    register_configs(Registry())


def table(text: str) -> list[list[str]]:
    """The cells of each line of the last table in `text`, its head first."""
    lines = text[text.index("the runs of this sweep") :].splitlines()
    shown = list[list[str]]()
    for line in (line for line in lines if line[0] in "┃│"):
        cells = [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")]
        if not shown or cells[shown[0].index("tokens/s")]:
            shown.append(cells)
        else:  # what had no room in a line goes on in the next one
            shown[-1] = [" ".join(filter(None, pair)) for pair in zip(shown[-1], cells, strict=True)]
    return shown


def swept(*runs: tuple[str, dict[str, Any]]) -> list[list[str]]:
    """The table of runs with these options and metrics."""
    made = []
    for number, (words, metrics) in enumerate(runs):
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            options = OmegaConf.to_object(compose("config", words.split()))
        assert isinstance(options, RunConfig)
        made.append(SweptRun(options, words.split(), Path("out") / str(number), result=JobResult(metrics)))
    console = Console(width=160, record=True, quiet=False)
    with console.capture() as capture:
        print_sweep(console, made)
    return table(capture.get())


def figures(speed: float, tau: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"decode_tokens_per_second": speed, "mean_acceptance_length": tau, **more}


def test_a_sweep_ends_with_a_line_for_each_run(decode: Callable) -> None:
    result = decode("-m", "drafter=none,llma", "batch_size=1,2", "max_new_tokens=4", "check=greedy", "data.limit=2")
    head, *lines = table(result.out)
    assert head == ["batch_size", "drafter", "tokens/s", "× no drafts", "τ", "check", "folder"]
    assert [line[:2] for line in lines] == [["1", "none"], ["1", "llma"], ["2", "none"], ["2", "llma"]]
    written = [json.loads((result.folder / str(job) / "metrics.json").read_text()) for job in range(4)]
    for job, line in enumerate(lines):
        config = OmegaConf.load(result.folder / str(job) / "config.yaml")
        assert [str(config.batch_size), config.drafter.name] == line[:2]
        assert len((result.folder / str(job) / "generations.jsonl").read_text().splitlines()) == 2
    for job, (line, metrics) in enumerate(zip(lines, written, strict=True)):
        speed, tau = (f"{metrics[name]:{form}}" for name, form in
                      (("decode_tokens_per_second", ".1f"), ("mean_acceptance_length", ".2f")))  # fmt: skip
        assert line[2:] == [speed, f"{metrics['speedup']:.2f}× (too short to tell)", tau, "2 exact", f"out/{job}"]


def test_a_run_that_fails_is_a_line_and_resume_tries_it_again(emssd: Callable, model: str, work: Path) -> None:
    few = ("prompt=abc", "max_new_tokens=2", "progress=false", "output_dir=out")
    sweep = ("-m", f"model.path=later,{model}", "drafter=none,rest", *few)
    first = emssd(*sweep)
    again = "once their causes are mended, the same command with resume=true makes them"
    assert first.sentence == f"3 of 4 runs failed; {again}"
    ends = [line[-1].partition(":")[0] for line in table(first.out)]
    assert ends == ["folder", "failed", "failed", "out/2", "failed"]
    (why,) = {line[-1] for line in table(first.out) if "rest" in line and "datastore" in line[-1]}
    assert why.startswith("failed: drafter=rest drafts from a datastore: give drafter.store=FOLDER")
    assert f"{why}\n" in first.err
    assert why.removeprefix("failed: ") in [run["error"] for run in jsonl(first.folder / "failed.jsonl")]
    report_main([str(first.folder), "--out", "page"])
    page = (work / "page" / "report.md").read_text()
    assert "## Runs that failed" in page
    assert "drafter=rest drafts from a datastore" in page
    (work / "later").symlink_to(model)
    done = first.folder / "2" / "generations.jsonl"
    before = done.stat().st_mtime_ns
    assert emssd(*sweep, "resume=true").sentence.startswith("2 of 4 runs failed;")
    assert (done.stat().st_mtime_ns, (first.folder / "0" / "metrics.json").exists()) == (before, True)


@pytest.mark.parametrize("names", only([SOME, EVERY], ci=[SOME]))
def test_a_sweep_over_drafters_ends_with_a_line_for_each(names: list[str], emssd: Callable, work: Path) -> None:
    """With a model of the user's own and no option of a drafter, each runs, or says in a sentence why not."""
    network = tiny_model("llama", dtype=torch.float32, vocab_size=len(tokenizer := byte_tokenizer()), max_model_len=96)
    for part in (network, tokenizer):
        part.save_pretrained(work / "own")
    few = ("prompt=abcabcab", "max_new_tokens=4", "progress=false", "output_dir=out")
    result = emssd("-m", "model.path=own", f"drafter={','.join(names)}", "check=plain", *few)
    _, *lines = table(result.out)
    assert [line[0] for line in lines] == names
    failed = {line[0]: line[-1] for line in lines if line[-1].startswith("failed: ")}
    assert all(f"{why}\n" in result.err for why in failed.values())
    assert failed.keys() <= NEED_FILES
    assert {line[-2] for line in lines if line[0] not in failed} == {"1 exact"}
    assert result.sentence.startswith(f"{len(failed)} of {len(names)} runs failed;")


def test_a_run_is_compared_with_the_plain_one_of_its_own_options() -> None:
    _, *lines = swept(
        ("batch_size=1 drafter=none", figures(10)),
        ("batch_size=2 speculate=false", figures(30)),
        ("batch_size=1 drafter=suffix drafter.cache_bias=2", figures(15, 1.5)),
        ("batch_size=2 drafter=llma", figures(45, 1.25)),
        ("batch_size=4 drafter=llma", figures(60, 1.25)),
    )
    assert [line[-3] for line in lines] == ["1.00×", "1.00×", "1.50×", "1.50×", "–"]


def test_without_a_plain_run_the_one_of_the_check_counts_and_differences_are_told() -> None:
    right, wrong = {"exact": 5, "ties": 0, "differences": 0}, {"exact": 3, "ties": 1, "differences": 1}
    head, *lines = swept(
        ("batch_size=1 check=greedy", figures(10, speedup=1.25, speedup_interval=[1.2, 1.304], check=right)),
        ("batch_size=2 check=greedy", figures(10, speedup=1.5, check=wrong)),
        ("batch_size=3", figures(10)),
    )
    assert head[-2:] == ["check", "folder"]
    assert [line[2:-1] for line in lines] == [
        ["10.0", "1.25× (1.20–1.30)", "1.00", "5 exact"],
        ["10.0", "1.50× (too short to tell)", "1.00", "3 exact, 1 ties, 1 DIFFERENCES"],
        ["10.0", "–", "1.00", "–"],
    ]


def test_every_option_but_those_of_drafting_tells_runs_apart() -> None:
    """A field that is added to the options is compared, unless it is put among the exceptions on purpose."""
    run = SweptRun(RunConfig(), [], Path())
    ignored = {"drafter", "speculate", "check", "output_dir"}
    for field in dataclasses.fields(RunConfig):
        options = copy(run.options)
        setattr(options, field.name, object())
        changed = dataclasses.replace(run, options=options)
        assert (_others(changed) == _others(run)) == (field.name in ignored), field.name


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> str:
    """The option that chooses a launcher which is not Hydra's own."""
    package, module = ModuleType("hydra_plugins"), ModuleType("hydra_plugins.stand_in")
    stand_in = type("JoblibLauncher", (BasicLauncher,), {"__module__": module.__name__})
    module.JoblibLauncher, package.stand_in = stand_in, module
    for made in (package, module):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    name = f"{module.__name__}.JoblibLauncher"
    monkeypatch.setitem(Plugins.instance().class_name_to_class, name, stand_in)
    return f"hydra.launcher._target_={name}"


def test_an_experiment_with_another_launcher_ends_before_anything_runs(launcher: str, emssd: Callable) -> None:
    result = emssd("-m", "experiment=fig1", "size=toy", "output_dir=out", launcher)
    page = Path(__file__).resolve().parents[2] / "docs" / "how_to" / "sweeps.md"
    (error,) = re.findall(r"With another launcher nothing runs: `([^`]*)`", page.read_text(encoding="utf-8"))
    assert result.sentence == " ".join(error.split())
    assert not (result.folder / "rows.jsonl").exists()
