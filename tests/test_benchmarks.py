"""Programs of the benchmarks on little: they run, and their tokens are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.benchmark
def test_engines_are_compared_and_their_rows_are_equal(tmp_path: Path) -> None:
    """Drafters, budgets, trees, sampling, batching and admission; the last cell samples, so its rows differ."""
    out, draft = tmp_path / "rows.json", "drafter=draft_model drafter.path=demo-draft"
    cells = {
        "suffix": "drafter=suffix budget=fixed",
        "chain": f"{draft} drafter.num_speculative_tokens=2 budget=fixed",
        "tree": f"{draft} drafter.tree=dynamic drafter.num_nodes=4",
        "static": "batching=static",
        "small cache": "kv_memory=4MB admission=worst_case",
        "sampled": "drafter=none sampling.temperature=1.0",
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "compare.py"), "batch_size=1,2", "max_new_tokens=8"]
    command += ["model.dtype=float32", "--prompts-per-row", "2", "--repeats", "1", "--out", str(out)]
    command += [word for label, options in cells.items() for word in ("--cell", f"{label}: {options}")]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["options"][1] for row in rows] == ["batch_size=1", "batch_size=2"]
    for row in rows:
        assert [*row["cells"]] == ["plain", *cells]
        equal = {label: cell["equal_rows"] for label, cell in row["cells"].items()}
        assert equal.pop("sampled") < 8
        assert set(equal.values()) == {8}, "in float32 all are equal"
        assert row["cells"]["suffix"]["tau"] > row["cells"]["plain"]["tau"] == 1
