"""The GPU benchmark's program on the CPU: it runs, its tokens are right, and it does not measure twice."""

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
    assert {name.split()[2] for name in decoded} == {"flashinfer", "padded", "hf"}
    for name, row in decoded.items():
        assert f"batch={row['equal_rows']} " in name, f"{name} has wrong tokens in some rows"
    results["pieces"] = {KNOWN: results["pieces"][KNOWN] | {"seconds": 0.125}} | decoded
    out.write_text(json.dumps(results))
    printed = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True).stdout
    again = json.loads(out.read_text())["pieces"]
    assert again[KNOWN]["seconds"] == 0.125, "a piece that was there was measured again"
    assert len([name for name in again if name.startswith("step")]) == 6, "the missing pieces were not measured"
    assert "125.00" in printed
