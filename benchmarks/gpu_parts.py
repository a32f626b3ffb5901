"""The parts of `gpu_run.sh`, with the steps and time limits of each; runs one of them.

    python benchmarks/gpu_parts.py PART RESULTS SECONDS

A part leaves in RESULTS how its steps ended (``partN.json``, written after each), and what they found out
(``partN-tests.xml``, ``partN-gpu.json``). A step at its limit is interrupted, so that it can still write, and then
killed; the next one begins. The last step has whatever is left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kernels_ahead import VARIANTS

__all__ = ["DEVICE_FAILED", "GRACE", "PART_SECONDS", "PREPARATION_SECONDS", "Step", "plan", "run_part"]

DEVICE_FAILED = 75  # exit status of a program that must go on in a new process; Python and pytest have none such
# All of a part, from the first line of gpu_run.sh; a command may take 600.
PART_SECONDS = int(os.environ.get("EMSSD_PART_SECONDS", 570))
PREPARATION_SECONDS = 90  # usually, of these for installing and looking around
GRACE = 10  # seconds from the interruption of a step to its death, within its limit
_SHAPES = ("llama-3-8b", "qwen3-8b", "opt-6.7b")
_DRY = ("--device", "cpu", "--shape", "tiny", "--repeats", "2", "--new-tokens", "8")


@dataclass(frozen=True)
class Step:
    """A command with its limit in seconds; or, in place of the command, why there is none."""

    name: str
    limit: int
    command: tuple[str, ...] = ()
    skipped: str = ""


def plan(results: Path, kernels: Path, *, dry: bool = False) -> dict[int, list[Step]]:
    """The steps of each part; `dry`, of a tiny model on the CPU, to see that all of this works."""

    def build(limit: int, *variants: str) -> Step:
        if dry:
            return Step("kernels", limit, skipped="a dry run has no kernels to build")
        command = ("benchmarks/kernels_ahead.py", "--keep", str(kernels), "--variants", *variants)
        return Step("kernels", limit, (sys.executable, *command))

    def test(limit: int, part: int) -> Step:
        files = ("tests/gpu/test_flashinfer.py", "tests/gpu/test_cuda.py")
        options = ("-n", "12", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={results}/part{part}-tests.xml")
        return Step("tests", limit, (sys.executable, "-m", "pytest", "-m", "gpu", *files, *options))

    def measure(part: int, limit: int, kinds: str, shapes: Sequence[str] = _SHAPES) -> Step:
        chosen = _DRY if dry else ("--shape", *shapes)
        options = ("--only", *kinds.split(), "--out", str(results / f"part{part}-gpu.json"))
        return Step(kinds, limit, (sys.executable, "benchmarks/gpu.py", "--quick", *options, *chosen))

    def demo(limit: int) -> Step:
        model = ("model.device=cpu",) if dry else ("model.device=cuda", "model.dtype=float16", "backend=flashinfer")
        command = ("-m", "emssd", "drafter=eagle3", *model, "check=greedy", "data.limit=8")
        return Step("a head drafts trees for the demo's model", limit, (sys.executable, *command))

    tiny, first = measure(4, 60, "step --repeats 2", ["tiny"]), build(100, "fp16-128")
    return {
        1: [first, measure(1, 300, "profile host products"), measure(1, 60, "tuned")],
        2: [first, measure(2, 280, "decode --batch 8 1"), measure(2, 80, "loop --batch 8 1")],
        3: [first, measure(3, 180, "padding --batch 8 1 16 24"), measure(3, 180, "decode --batch 16 24 2 4")],
        4: [build(130, *VARIANTS), test(200, 4), demo(60), _sanitized(tiny, dry)],
        5: [first, measure(5, 300, "step")],
    }


def _sanitized(step: Step, dry: bool) -> Step:
    """The step under NVIDIA's memory checker, whose exit status says whether it found something."""
    if dry:
        return step
    beside = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(beside))
    if found is None:
        return Step("compute-sanitizer", step.limit, skipped="there is no compute-sanitizer on PATH")
    return Step("compute-sanitizer", step.limit, (found, "--error-exitcode", "9", *step.command))


def run_part(name: str, steps: Sequence[Step], results: Path, seconds: float) -> bool:
    """Run `steps` one after another, for `seconds` in all; whether all of them ended well."""
    deadline, rows = time.monotonic() + seconds, []
    for number, step in enumerate(steps, 1):
        start = time.monotonic()
        limit = deadline - start if number == len(steps) else min(step.limit, deadline - start)
        print(f"== {name}, {number}/{len(steps)}: {step.name} (at most {limit:.0f} s)", flush=True)
        ended = _run(step, start + limit)
        took = time.monotonic() - start
        print(f"== {step.name}: {ended}, {took:.0f} s", flush=True)
        rows.append({"step": step.name, "ended": ended, "seconds": round(took, 1), "limit": round(limit)})
        (results / f"{name}.json").write_text(json.dumps(rows, indent=2) + "\n")
    return all(row["ended"] == "well" or str(row["ended"]).startswith("skipped") for row in rows)


def _run(step: Step, deadline: float) -> str:
    """Run a step, and return how it ended. One that ends because the device failed goes on in a new process."""
    if step.skipped:
        return f"skipped: {step.skipped}"
    while (left := deadline - GRACE - time.monotonic()) > 0:
        process = subprocess.Popen(step.command, process_group=0, preexec_fn=_interruptible)
        try:
            status = process.wait(left)
        except subprocess.TimeoutExpired:
            break
        finally:
            _end(process)
        if status != DEVICE_FAILED:
            return "well" if status == 0 else f"exit status {status}"
    return "cut off"


def _interruptible() -> None:
    """Let SIGINT end the new process, even if this program was started in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the process and all that it started, and kill what is left of them."""
    for number, wait in ((signal.SIGINT, GRACE - 2), (signal.SIGKILL, 2)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(wait)


def main() -> None:
    part, results, seconds = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    parts = plan(results, Path(os.environ["EMSSD_KERNELS"]), dry=bool(os.environ.get("EMSSD_DRY_RUN")))
    if not run_part(f"part{part}", parts[part], results, seconds):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
