"""The output of a run: rows or a text on stdout, first texts and remarks at the end, all else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emssd.cli.busy import CPUTimes, OtherProcesses
from emssd.cli.console import remarks, shortened
from emssd.cli.output import OutputFolder
from emssd.errors import OutputError
from tests.support.tiers import looped

from .conftest import RESUME

METRICS: dict[str, Any] = {"mean_acceptance_length": 2.0, "other_cpu_share": 0.05}
METRICS |= {"num_row_steps": 100, "num_allotted_tokens": 10}
FIGURE = " tokens/s, without the time for prompts\n"
RETRIEVE = ("drafter=llma", "drafter.search=prompt_and_output", "drafter.copy_length=3")


def test_results_go_to_stdout_and_what_is_said_on_the_way_to_stderr(decode: Callable) -> None:
    result = decode("check=greedy", "progress=true")
    for message in ("loading ", "decoding both ways ━", "10/10"):
        assert (message in result.err, message in result.out) == (True, False)
    for shown in (FIGURE, "check=greedy: 5 exact", "written to out/", "prompts.txt:1\n"):
        assert (shown in result.err, shown in result.out) == (False, True)


def test_prompts_without_text_are_told_by_their_length(emssd: Callable, model: str) -> None:
    random = ("data=random", "data.limit=1", "data.num_tokens=7", "data.vocab_size=200")
    assert "  prompt: 7 token ids\n" in emssd(f"model.path={model}", *random, "max_new_tokens=2").out


def test_texts_are_shortened_to_a_paragraph_that_commands_no_terminal() -> None:
    assert shortened("a\n\n b\tc", 9) == "a b c"
    assert shortened("ab cd ef", 5) == "ab cd …"
    assert shortened("ab cd ef", 5, keep_end=True) == "… cd ef"
    assert shortened("x\x1b[2Jy\x9bz", 9) == "x [2Jy z"


@looped(
    "figures, why",
    [
        ({"mean_acceptance_length": 1.0049}, "no draft was accepted"),
        ({"mean_acceptance_length": 1.0, "speedup": 1.37, "speedup_interval": [1.2, 1.5]}, "no draft was accepted"),
        ({"speedup": 0.9, "speedup_interval": [0.81, 0.99]}, "the drafts cost more time than they save"),
        *((figures, None) for figures in (
            {}, {"mean_acceptance_length": 1.01}, {"speedup": 1.2, "speedup_interval": [1.1, 1.3]},
            {"speedup": 0.9, "speedup_interval": [0.7, 1.1]}, {"speedup": 0.5, "speedup_interval": None},
        )),
    ],
)  # fmt: skip
def test_where_drafts_do_not_pay(figures: dict[str, Any], why: str | None) -> None:
    """There is no verdict where the interval includes 1, or the run was too short for one."""
    sentence = (
        f"{why}: try another drafter (emssd-plugins lists them), other options of this one, or a smaller batch_size"
    )
    assert remarks(METRICS | figures, drafts=True) == ([sentence] if why else [])
    assert remarks(METRICS | figures, drafts=False) == []


def test_where_the_policy_drafted_nothing_no_other_drafter_would_help() -> None:
    figures = {"mean_acceptance_length": 1.0, "num_allotted_tokens": 9}
    assert remarks(METRICS | figures, drafts=True) == [
        "hardly anything was drafted: by what the budget policy measured, drafts do not pay here; budget=fixed drafts "
        "all the same"
    ]


def test_a_run_says_that_nothing_was_accepted(decode: Callable) -> None:
    never = decode("drafter=llma", "drafter.match_length=60", "budget=fixed")
    assert never.metrics["mean_acceptance_length"] == 1
    assert "no draft was accepted: try another drafter" in never.out
    assert "no draft was accepted" not in decode("drafter=none").out + decode(*RETRIEVE, "budget=fixed").out


@looped("run, greedy, said", [(0.25, None, "25%"), (0.0, 0.5, "50%"), (0.1, 0.1, None), (None, None, None)])
def test_a_busy_machine(run: float | None, greedy: float | None, said: str | None) -> None:
    lines = remarks(METRICS | {"other_cpu_share": run, "greedy": {"other_cpu_share": greedy}}, drafts=True)
    sentence = f"the machine was busy: other processes used {said} of its cores, so its times may mislead"
    assert lines == ([sentence] if said else [])


def counted(busy: float, idle: float, ours: float, seconds: float = 10.0) -> Callable[[], CPUTimes]:
    """Readings of two cores between which so many seconds pass, and that CPU time of all, of none and of ourselves."""
    then = CPUTimes(100.0 + seconds, 2, 7.0 + busy, 9.0 + idle, 3.0 + ours)
    readings = iter([CPUTimes(100.0, 2, 7.0, 9.0, 3.0), then])
    return lambda: next(readings)


@looped(
    "busy, idle, ours, seconds, share",
    [
        (12.0, 8.0, 10.0, 10.0, 0.1),
        (10.0, 10.0, 10.0, 10.0, 0.0),
        (9.9, 10.0, 10.0, 10.0, 0.0),  # counted a little apart
        (20.0, 0.0, 0.0, 10.0, 1.0),
        (0.0, 0.0, 10.0, 10.0, None),  # a sandbox whose system counts nothing
        (0.2, 0.2, 0.1, 0.2, None),  # too short for a clock of hundredths
    ],
)
def test_the_share_of_others(busy: float, idle: float, ours: float, seconds: float, share: float | None) -> None:
    with OtherProcesses(counted(busy, idle, ours, seconds)) as others:
        pass
    assert others.share == (None if share is None else pytest.approx(share))


def test_rows_go_to_stdout_and_all_else_to_stderr(decode: Callable, work: Path) -> None:
    expected = decode().tokens
    before = sorted(work.rglob("*"))
    result = decode("output_dir=-", "overwrite=false", "check=plain", "drafter=llma")
    assert result.status == 0
    assert {row["id"]: row["token_ids"] for row in map(json.loads, result.out.splitlines())} == expected
    for shown in ("loading ", FIGURE, "check=plain: 5 exact", "  prompt: hello hello hello"):
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
    shown = emssd(*options, "figures=true")
    assert shown.out.startswith(f"{text}\n{model} · ")
    assert FIGURE in shown.out
    assert "written to out/: " in shown.out


def test_a_check_of_a_finished_job_is_no_check(decode: Callable) -> None:
    decode("data.limit=1", "check=plain")
    assert decode(*RESUME, "data.limit=1", "check=plain").status == 0  # its metrics hold what was found
    decode("data.limit=1")
    assert decode(*RESUME, "data.limit=1", "check=plain").sentence == (
        "check=plain compares the rows that a run decodes, and out holds all; leave check= out, or decode them again "
        "with overwrite=true"
    )
