"""The benchmarks' programs on little: they run, their tokens are right, and the GPU's does not measure twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KNOWN = "step tiny flashinfer batch=1 tokens=8 context=24"


@pytest.mark.benchmark
def test_the_gpu_benchmark_measures_what_is_missing_and_checks_the_tokens(tmp_path: Path) -> None:
    out = tmp_path / "results" / "gpu.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--shape", "tiny", "--quick"]
    command += ["--new-tokens", "6", "--repeats", "1", "--acceptance-length", "3", "--out", str(out)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    results = json.loads(out.read_text())
    decoded = {name: row for name, row in results["pieces"].items() if name.startswith("decode")}
    assert {name.split()[2] for name in decoded} == {"flashinfer", "flashinfer-eager", "padded", "hf"}
    for name, row in decoded.items():
        assert f"batch={row['equal_rows']} " in name, f"{name} has wrong tokens in some rows"
    results["pieces"] = {KNOWN: results["pieces"][KNOWN] | {"seconds": 0.125}} | decoded
    out.write_text(json.dumps(results))
    printed = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True).stdout
    again = json.loads(out.read_text())["pieces"]
    assert again[KNOWN]["seconds"] == 0.125, "a piece that was there was measured again"
    assert len([name for name in again if name.startswith("step")]) == 6, "the missing pieces were not measured"
    assert "125.00" in printed


@pytest.mark.benchmark
def test_engines_are_compared_and_their_rows_are_equal(tmp_path: Path) -> None:
    """Drafters, budgets, trees, sampling, batching and admission; the last cell samples, so its rows differ."""
    out, draft = tmp_path / "rows.json", "drafter=draft_model drafter.path=demo-draft"
    cells = {
        "suffix": "drafter=suffix",
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
