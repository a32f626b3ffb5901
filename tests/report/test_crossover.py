"""The advice of the crossover: it follows from rows that are there, and its commands run what was measured."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from emssd.jobs.config import conf_dir, register_configs
from emssd.plugins.registry import Registry
from emssd.report.sections.crossover import command_for, crossover
from emssd.report.sources import read

from .conftest import row, value, write

AROUND = ("experiment", "size", "output_dir", "repeat", "method", "overwrite", "resume", "progress")
PLAIN, ALWAYS, ADAPTIVE = (False, "fixed"), (True, "fixed"), (True, "adaptive")  # speculate, budget
RATES = {PLAIN: 100.0, ALWAYS: 150.0, ADAPTIVE: 90.0}


def cells(*lines: tuple[bool, str], batch_size: int = 8, repeats: int = 2, **rates: float) -> Iterator[dict[str, Any]]:
    """Rows of the lines; `rates` replace those of ``always`` and the like."""
    named = {"plain": PLAIN, "always": ALWAYS, "adaptive": ADAPTIVE}
    changed = RATES | {named[name]: rate for name, rate in rates.items()}
    for repeat in range(1, repeats + 1):
        for speculate, budget in lines:
            yield value(
                "crossover", None, repeat=repeat, batch_size=batch_size, speculate=speculate, budget=budget,
                budget_options=budget, metrics_decode_tokens_per_second=changed[speculate, budget],
            )  # fmt: skip


def said(folder: Path, rows: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> str:
    write(folder, rows)
    section = crossover(read([folder]))
    assert section is not None
    return "\n".join(block for block in section.blocks if isinstance(block, str))


def test_without_plain_decoding_nothing_is_advised(tmp_path: Path) -> None:
    text = said(tmp_path, cells(ALWAYS, ADAPTIVE))
    assert "| 8 |  | not known: no row of plain greedy decoding to compare with |  |" in text
    assert "drafter=none" not in text


def test_with_nothing_but_plain_decoding_it_is_not_advised(tmp_path: Path) -> None:
    text = said(tmp_path, [*cells(PLAIN, ALWAYS, batch_size=4), *cells(PLAIN, batch_size=8)])
    assert "| 4 | 1.50 (1.50–1.50) | llma, budget fixed |" in text
    assert "| 8 |  | not known: nothing but plain greedy decoding was run |  |" in text


def test_plain_decoding_is_advised_where_nothing_is_faster(tmp_path: Path) -> None:
    text = said(tmp_path, cells(PLAIN, ALWAYS, ADAPTIVE, always=80.0))
    assert "| 8 | 1 | plain greedy decoding | `python -m emssd model=demo drafter=none batch_size=8` |" in text


def test_what_was_not_compared_is_named(tmp_path: Path) -> None:
    rows = [*cells(PLAIN, ALWAYS, ADAPTIVE, batch_size=4), *cells(PLAIN, ALWAYS, batch_size=8)]
    text = said(tmp_path, rows)
    assert "llma, budget fixed; not compared: adaptive on padded |" in text
    assert text.count("not compared") == 1


def test_advice_says_how_sure_it_is(tmp_path: Path) -> None:
    assert "budget fixed (one repeat) |" in said(tmp_path, cells(PLAIN, ALWAYS, repeats=1))
    mixed = [*cells(PLAIN, ALWAYS, repeats=3)]
    mixed[1]["metrics"]["decode_tokens_per_second"] = 90.0
    assert "budget fixed (too close to call) |" in said(tmp_path, mixed)


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("always", ["data=jsonl", "data.path='my file.jsonl'", "num_threads=3", "check=greedy"]),
        ("adaptive", ["task=toy", "data.limit=3", "model.dtype=float64", "backend=padded", "backend.pad_kv=false"]),
        ("always", ["drafter=llma_original", "drafter.copy_length=3"]),
        ("adaptive", ["drafter=draft_opt_125m", "budget.memory=2", "+model.architecture.x=1"]),
        ("vanilla", ["drafter=replay", "drafter.p=0.5", "budget=fixed", "batching=static"]),
    ],
)
def test_the_advised_command_runs_what_was_measured(method: str, given: list[str]) -> None:
    overrides = ["repeat=2", "batch_size=8", f"method={method}", "experiment=crossover", *given, "output_dir=out"]
    job = _composed(overrides)
    mine = row(
        "crossover", job["method"], batch_size=8, overrides=overrides, drafter=job["drafter"]["name"],
        budget=job["budget"]["name"],
    )  # fmt: skip
    assert _kept(_composed(_arguments(command_for(mine)))) == _kept(job)
    baseline = _composed(["batch_size=8", "experiment=crossover", "method=greedy", *given])
    expected = _kept(job if job["method"] is None else baseline)
    plain = _kept(_composed(_arguments(command_for(mine, speculate=False))))
    assert plain.pop("drafter") == {"name": "none"}
    for config in (expected, plain):
        for name in ("drafter", "budget", "speculate"):  # plain decoding has no use for them
            config.pop(name, None)
    assert plain == expected


def test_presets_of_the_users_own_are_found_by_the_advised_command() -> None:
    for option in (["--config-dir", "my presets"], ["--config-dir=my presets"], ["-cd", "my presets"]):
        overrides = ["batch_size=2", "method=always", "experiment=crossover", "drafter=mine"]
        provenance = row().provenance | {
            "command": shlex.join(["python", "-m", "emssd", "-m", *option, *overrides[2:]])
        }
        mine = row("crossover", None, overrides=overrides, provenance=provenance)
        assert shlex.split(command_for(mine))[3:] == [*option, "drafter=mine", "budget=fixed", "batch_size=2"]


def _arguments(command: str) -> list[str]:
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "emssd"]
    return words[3:]


def _composed(overrides: list[str]) -> dict[str, Any]:
    register_configs(Registry())
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = hydra.compose("config", overrides)
    found = OmegaConf.to_container(config)
    assert isinstance(found, dict)
    return {str(name): part for name, part in found.items()}


def _kept(config: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in config.items() if name not in AROUND}
