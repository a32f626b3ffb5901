"""Provenance of a result that is kept: command, commit, date, versions and hardware."""

from __future__ import annotations

import datetime
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

import emssd
from emssd.cli.provenance import hardware, machine_rates, versions

__all__ = ["provenance"]


def provenance(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Command, commit, date, versions and hardware of this process, for a result that is kept."""
    rates = dict(zip(("bytes_per_second", "flops_per_second"), machine_rates(device, dtype), strict=True))
    script = Path(sys.argv[0]).name
    program = ["-m", "emssd"] if script in ("__main__.py", "emssd") else [script]
    return {
        "command": shlex.join(["python", *program, *sys.argv[1:]]),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "hardware": hardware(device) | rates,
    }


@cache
def _commit() -> str | None:
    """The checkout that emssd runs from, ``-dirty`` if it was changed; ``None`` for an installed wheel."""
    root = Path(emssd.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        return subprocess.check_output(
            ["git", "describe", "--always", "--dirty"], cwd=root, stderr=subprocess.DEVNULL, text=True
        ).strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or not a repository that it trusts
        return None
