"""The best rates of a machine, measured for the device that runs, and before anything else takes the memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from emssd import __version__
from emssd.cli import job, provenance

from .conftest import drafter


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


def test_rates_are_measured_once_for_each_number_of_threads(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rates(threads: int) -> tuple[float, float]:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return provenance.machine_rates(torch.device("cpu"), torch.float32)

    one, two = rates(1), rates(2)
    assert two == (one[0] / 2, one[1] / 2)
    assert rates(1) == one
    assert len(measured) == 4  # a bandwidth and a rate of arithmetic for each


def test_rates_are_measured_before_an_engine_takes_the_memory(measured: list[str], emssd: Callable) -> None:
    result = emssd("-m", "experiment=fig1", "size=toy", "method=greedy,vanilla", "output_dir=out", "progress=false")
    assert result.status == 0, result.err
    assert measured == ["measured", "measured", "engine", "engine"]


def test_a_run_of_no_experiment_measures_nothing(measured: list[str], decode: Callable) -> None:
    assert decode().metrics["hardware"] == provenance.hardware(torch.device("cpu"))
    assert measured == ["engine"]


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
    names = [{each["name"] for each in found if each["kind"] == "drafter"} for found in kept]
    assert names == [{"cascade", "llma", "pld"}, {"cascade", "pld", "none"}]
