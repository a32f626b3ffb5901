"""Seconds of the first command on a quiet machine and beside busy processes, by how threads wait for each other.

    python benchmarks/busy_machine.py --out docs/results/busy_machine.json

PyTorch's threads wait in libgomp, which spins before it sleeps. On a busy machine, a thread spins for one that is not
scheduled. Each variant is an environment of `python -m emssd`.
All variants run in turns, on the quiet machine and beside ``--busy`` processes that never sleep. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

VARIANTS: dict[str, dict[str, str]] = {
    "as emssd sets it": {},
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "100,000 spins": {"GOMP_SPINCOUNT": "100000"},
    "10,000 spins": {"GOMP_SPINCOUNT": "10000"},
    "3,000 spins": {"GOMP_SPINCOUNT": "3000"},
    "1,000 spins": {"GOMP_SPINCOUNT": "1000"},
    "no spin": {"GOMP_SPINCOUNT": "0"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def measure(variant: dict[str, str], arguments: list[str]) -> tuple[float, float]:
    """Seconds of the whole command, and tokens per second of decoding."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))} | variant
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "emssd", "progress=false", "output_dir=out", *arguments]
        begun = time.perf_counter()
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        seconds = time.perf_counter() - begun
        metrics = json.loads((Path(folder) / "out" / "metrics.json").read_text())
    return seconds, metrics["decode_tokens_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--busy", type=int, default=2, help="processes that never sleep")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--out", type=Path)
    parser.add_argument("arguments", nargs="*", help="of python -m emssd")
    options = parser.parse_args()
    measure({}, options.arguments)  # fills the caches
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: {"quiet": [], "busy": []} for name in options.only}
    for _ in range(options.repeats):
        for machine in ("quiet", "busy"):
            with ExitStack() as stack:
                for _ in range(options.busy if machine == "busy" else 0):
                    other = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                    stack.callback(other.kill)
                for name in options.only:
                    found[name][machine].append(measure(VARIANTS[name], options.arguments))
    table = Table("threads", "quiet, s", "busy, s", "busy ÷ quiet", "quiet, tokens/s", "busy, tokens/s")
    for name, machines in found.items():
        quiet, busy = (
            [statistics.median(each) for each in zip(*machines[key], strict=True)] for key in ("quiet", "busy")
        )
        ratio = f"{busy[0] / quiet[0]:.2f}"
        table.add_row(name, f"{quiet[0]:.2f}", f"{busy[0]:.2f}", ratio, f"{quiet[1]:.0f}", f"{busy[1]:.0f}")
    Console().print(table)
    if options.out:
        machine_of = {"machine": platform.machine(), "cores": os.cpu_count(), "busy": options.busy}
        options.out.write_text(json.dumps(machine_of | {"seconds_and_tokens_per_second": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
