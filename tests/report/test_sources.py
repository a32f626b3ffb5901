"""Everything in a folder is found, and nothing is shown twice."""

from __future__ import annotations

import json
from pathlib import Path

from emssd.report.rows import read

from .conftest import value, write

RUN = {"title": "demo", "tokens_per_second": 10.0, "num_new_tokens": 5, "decode_tokens_per_second": 12.0}
RUN |= {"mean_acceptance_length": 1.5}


def run(folder: Path) -> None:
    """A run's folder."""
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(RUN))


def test_results_below_other_results_are_found_but_not_the_experiments_own_runs(tmp_path: Path) -> None:
    run(tmp_path / "results")
    write(tmp_path / "results" / "fig1", [value("fig1", "greedy")])
    run(tmp_path / "results" / "fig1" / "0")
    run(tmp_path / "results" / "fig1" / "other")
    write(tmp_path / "results" / "fig1" / "ablation", [value("ablation", "greedy")])
    run(tmp_path / "results" / "sweep" / "0")
    found = read([tmp_path])
    assert [row.experiment for row in found.rows] == ["fig1", "ablation"]
    assert [str(Path(each.name).relative_to(tmp_path)) for each in found.runs] == [
        "results", "results/fig1/other", "results/sweep/0",
    ]  # fmt: skip
