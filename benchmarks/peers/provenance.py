"""The part of a result that says how to get it again: program, options and machine."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from pathlib import Path
from typing import Any

from peers.protocol import COPIED, DRAFTED, MATCHED

from emssd.cli.provenance import commit, processor

__all__ = ["provenance"]

PATHS = ("model", "draft_model", "data", "python", "openvino_export", "gguf", "references", "logs", "out")


def provenance(arguments: argparse.Namespace) -> dict[str, Any]:
    """Program, options and machine, without the paths of this machine."""
    return {
        "script": "benchmarks/cpu_peers.py",
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "device": _device(arguments.device),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "models": {"target": Path(arguments.model).name, "draft": Path(arguments.draft_model).name},
        "data": Path(arguments.data).name,
        "options": {name: value for name, value in vars(arguments).items() if name not in PATHS},
        "speculation": {"matched": MATCHED, "copied": COPIED, "drafted": DRAFTED},
    }


def _device(name: str) -> str:
    if not name.startswith("cuda"):
        return name
    import torch

    return torch.cuda.get_device_name(name) if torch.cuda.is_available() else f"{name}, which PyTorch does not find"
