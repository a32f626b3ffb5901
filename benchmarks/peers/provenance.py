"""What ran, and on what: the part of a result that says how to get it again."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from peers.protocol import COPIED, DRAFTED, MATCHED

__all__ = ["processor", "provenance"]

PATHS = ("model", "draft_model", "data", "python", "openvino_export", "logs", "out")


def provenance(arguments: argparse.Namespace) -> dict[str, Any]:
    """What ran, on what; without the paths of this machine."""
    root = Path(__file__).parent
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, check=False)
    return {
        "script": "benchmarks/cpu_peers.py",
        "commit": commit.stdout.decode().strip() or None,
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "models": {"target": Path(arguments.model).name, "draft": Path(arguments.draft_model).name},
        "data": Path(arguments.data).name,
        "options": {name: value for name, value in vars(arguments).items() if name not in PATHS},
        "speculation": {"matched": MATCHED, "copied": COPIED, "drafted": DRAFTED},
    }


def processor() -> str:
    """The processor's name, and those of its features on which arithmetic in bfloat16 depends."""
    known = Path("/proc/cpuinfo")
    if not known.is_file():
        return platform.processor() or platform.machine()
    lines = dict(line.partition(":")[::2] for line in known.read_text().splitlines() if ":" in line)
    said = {name.strip(): value for name, value in lines.items()}
    wanted = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in said.get("flags", "").split()]
    return f"{said.get('model name', platform.machine()).strip()} ({', '.join(wanted)})"
