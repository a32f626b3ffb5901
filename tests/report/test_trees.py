"""Chains and trees side by side by batch size, with nodes, acceptance and depth."""

from __future__ import annotations

from pathlib import Path

from emssd.report.sections.common import Plot
from emssd.report.tables import Table

from .conftest import section_of, value, write

RATES = {"none": 100.0, "draft_model": 150.0, "draft_model(tree=dynamic)": 180.0}


def rows() -> list[dict[str, object]]:
    return [
        value(
            "trees", None, repeat=repeat, batch_size=size, speculate=name != "none", drafter=name.partition("(")[0],
            drafter_options=name, backend="ragged", backend_options="ragged", budget_options="adaptive",
            metrics_decode_tokens_per_second=rate / (size if name != "none" else 1),
        )
        for repeat in (1, 2)
        for size in (1, 2)
        for name, rate in RATES.items()
    ]  # fmt: skip


def test_speed_nodes_and_depth_of_each_drafter_by_batch_size(tmp_path: Path) -> None:
    write(tmp_path, rows())
    section = section_of(tmp_path, "trees")
    assert section is not None
    speeds, nodes, steps, depths = (block for block in section.blocks if isinstance(block, Table))
    assert speeds.columns == ["drafter", "1", "2"]
    assert speeds.lines == [
        ["draft_model", "1.50 (1.50–1.50)", "0.75 (0.75–0.75)"],
        ["draft_model(tree=dynamic)", "1.80 (1.80–1.80)", "0.90 (0.90–0.90)"],
    ]
    # Of 20 row-steps 16 drafted 4 tokens, and 10 accepted 2.
    assert nodes.lines == [[name, "3.2, τ 2.00", "3.2, τ 2.00"] for name in list(RATES)[1:]]
    # The floor reads 4 MB of weights and 0.2 MB of KV for each row, at 10 GB/s.
    assert steps.lines == [[name, "6.00 (0.42)", "6.00 (0.44)"] for name in list(RATES)[1:]]
    assert depths.columns == ["drafter", "≥ 1", "≥ 2"]
    assert [line[0] for line in depths.lines] == [
        f"{name}, batch {size}" for name in list(RATES)[1:] for size in (1, 2)
    ]
    assert {tuple(line[1:]) for line in depths.lines} == {("50%", "50%")}
    assert sum(isinstance(block, Plot) for block in section.blocks) == 1


def test_without_speculation_there_is_no_section(tmp_path: Path) -> None:
    write(tmp_path, [row for row in rows() if not row["speculate"]])
    assert section_of(tmp_path, "trees") is None
