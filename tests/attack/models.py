"""The sweep over all model types of Transformers, which is a program of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["sweep"]

_SWEEP = Path(__file__).resolve().parents[2] / "benchmarks" / "model_sweep.py"


def sweep() -> int:
    """Run it. Returns 1 if it finds a difference, or is not there."""
    if not _SWEEP.exists():
        print(f"{_SWEEP} is not there, so that not all model types are swept")
        return 1
    return int(subprocess.run([sys.executable, _SWEEP, "--check"], check=False).returncode != 0)
