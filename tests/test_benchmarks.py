"""The benchmarks' programs on little: they run, their tokens are right, and the GPU's does not measure twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KNOWN = "step tiny flashinfer batch=1 tokens=8 context=24"


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("hf_generate.py", "--limit 4 --batch-sizes 2"),
        ("continuous.py", "--data {data} --model demo --prompts 6 --batch-size 2"),
        (
            "budgets.py",
            "--data {data} --model demo --draft-model demo-draft --batch-sizes 2 --drafters cascade --prompts plain "
            "--lengths 2",
        ),
    ],
)
def test_a_benchmark_runs_and_its_outputs_are_equal(script: str, options: str, tmp_path: Path) -> None:
    data, out = tmp_path / "questions.jsonl", tmp_path / "rows.json"
    data.write_text("".join(json.dumps({"question": f"How many of {i} are {i}?"}) + "\n" for i in range(9)))
    given = [*options.format(data=data).split(), "--repeats", "1", "--max-new-tokens", "8", "--out", str(out)]
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *given], check=True, timeout=300, capture_output=True
    )
    rows = json.loads(out.read_text())
    cells = [cell for row in rows for cell in row.get("cells", {"": row}).values()]
    counts = {cell["equal_rows"] for cell in cells}
    assert len(cells) > 2
    assert counts == {8 if script == "budgets.py" else 6 if script == "continuous.py" else 4}, (
        "in float32 all are equal"
    )


@pytest.mark.slow
def test_the_plot_of_the_demo_is_measured_and_drawn(tmp_path: Path) -> None:
    given = ["--out", str(tmp_path / "plot.svg"), "--drafters", "suffix,llma", "--batch-sizes", "2,4", "--repeats", "2"]
    command = [sys.executable, str(ROOT / "benchmarks" / "demo_plot.py"), *given, "data.limit=2", "max_new_tokens=4"]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    measured = json.loads((tmp_path / "plot.json").read_text())
    runs = [(run["repeat"], run["batch_size"], run["drafter"]) for run in measured["runs"]]
    assert runs == [
        (repeat, size, drafter) for repeat in (1, 2) for size in (2, 4) for drafter in ("none", "suffix", "llma")
    ], "repeats are not the outermost loop"
    assert "data.limit=2" in measured["provenance"]["command"]
    plot = (tmp_path / "plot.svg").read_text()
    assert [plot.count(f"drafter={name}<") for name in ("suffix", "llma", "none")] == [1, 1, 0]
