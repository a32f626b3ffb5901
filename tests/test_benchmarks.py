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
@pytest.mark.parametrize(
    ("script", "options", "num_rows"),
    [
        ("hf_generate.py", "--limit 4 --batch-sizes 2", 4),
        ("continuous.py", "--data {data} --model demo --prompts 6 --batch-size 2", 6),
        (
            "budgets.py",
            "--data {data} --model demo --draft-model demo-draft --batch-sizes 2 --drafters cascade --prompts plain "
            "--lengths 2",
            8,
        ),
        (
            "draft_trees.py",
            "--data {data} --model demo --draft-model demo-draft --batch-sizes 2 --prompts plain --lengths 2 --nodes 4 "
            "--expansion 2 1 --depth 2 --top-k 2",
            8,
        ),
        (
            "sampled_drafts.py",
            "--data {data} --model demo --draft-model demo-draft --prompts 4 --batch-size 2 --temperatures 0.8 "
            "--lengths 2 --nodes 4 --expansion 2 1 --depth 2 --top-k 2",
            4,
        ),
        (
            "sampling_speed.py",
            "--data {data} --model demo --draft-model demo-draft --batch-sizes 2 --prompts plain --length 2 --nodes 4 "
            "--depth 2 --top-k 2",
            8,
        ),
        (
            "coupled_residual.py",
            "--data {data} --model demo --draft-model demo-draft --methods coupled --temperatures 0.8 --prompts 4 "
            "--batch-size 2 --length 2 --expansion 2 1 --nodes 4 --width 2 --depth 2",
            4,
        ),
        ("tries.py", "--data {data} --model demo --branches 2 --batch-sizes 2 --categories qa --prompts 2", 2),
    ],
)
def test_a_benchmark_runs_and_its_outputs_are_equal(script: str, options: str, num_rows: int, tmp_path: Path) -> None:
    data, out = tmp_path / "questions.jsonl", tmp_path / "rows.json"
    texts = [f"How many of {i} are {i}?" for i in range(9)]
    data.write_text("".join(json.dumps({"question": text, "category": "qa", "turns": [text]}) + "\n" for text in texts))
    given = [*options.format(data=data).split(), "--repeats", "1", "--max-new-tokens", "8", "--out", str(out)]
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *given], check=True, timeout=300, capture_output=True
    )
    rows = json.loads(out.read_text())
    cells = [cell for row in rows for cell in row.get("cells", {"": row}).values()]
    assert len(cells) > 2
    assert {cell["equal_rows"] for cell in cells} == {num_rows}, "in float32 all are equal"


@pytest.mark.benchmark
def test_steps_with_trees_are_measured_beside_chains(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    sizes = ["--batch-sizes", "1", "2", "--contexts", "16", "--nodes", "4", "--repeats", "1", "--runs", "1"]
    command = [sys.executable, str(ROOT / "benchmarks" / "tree_step.py"), "--model", "demo", *sizes, "--out", str(out)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    rows = json.loads(out.read_text())["rows"]
    settings = [(row["batch_size"], row["context"], row["nodes"], row["what"]) for row in rows]
    assert settings == [(size, 16, 4, what) for size in (1, 2) for what in ("attention", "step")]
    assert all(set(row["all_ms"]) == {"chain", "bushy", "long"} for row in rows)


@pytest.mark.benchmark
def test_choosing_is_measured_and_the_kernels_tokens_are_pytorchs(kernels: None, tmp_path: Path) -> None:
    out = tmp_path / "choice.json"
    sizes = ["--batch-sizes", "1", "3", "--context", "9", "--repeats", "1", "--out", str(out)]
    command = [sys.executable, str(ROOT / "benchmarks" / "sampling_choice.py"), "--model", "demo", *sizes]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["batch_size"] for row in rows] == [1] * 4 + [3] * 4
    assert all(row["same_tokens"] for row in rows)


@pytest.mark.benchmark
def test_the_hosts_part_of_a_step_is_measured() -> None:
    """The script itself asserts that drafts are accepted as planned, and steps recorded."""
    command = [sys.executable, str(ROOT / "benchmarks" / "host_time.py"), "--batch-sizes", "1", "3", "--repeats", "1"]
    printed = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True).stdout
    sizes = [line.split()[1] for line in printed.splitlines() if line.startswith("│")]
    assert sizes == ["1", "3"]


@pytest.mark.benchmark
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
