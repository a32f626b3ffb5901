"""Seconds from the start of a process to its first token with filled caches, and where they go.

    python benchmarks/start.py --out docs/results/start.json

Each repeat is a process that runs the embedded demo as `python -m emssd` does, up to the first step that gives tokens.
*Importing PyTorch* is the floor: no program that uses it starts sooner. What comes before is Python and Hydra. The
untimed steps that precede a run's own (`emssd.decoding.warmup`) count as its first tokens here: they compute the same.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise

from common import make_parser, save, show

PARTS = ("Python, Hydra", "PyTorch", "options, plugins", "Transformers", "model and engine", "first step")
PROGRAM = """
import os, sys, time
started = float(os.environ["STARTED"])
stamps = []
def stamp():
    stamps.append(time.time() - started)
import emssd.cli.command as command
import emssd.__main__
stamp()
import torch
stamp()
from emssd.cli import job
from emssd.decoding.engine import Engine
def before(module, name):
    found = getattr(module, name)
    def run(*args, **kwargs):
        stamp()
        return found(*args, **kwargs)
    setattr(module, name, run)
check = job.check_options
def checked(config):
    stamp()
    import transformers.modeling_layers  # as loading the model does
    check(config)
job.check_options = checked
before(job, "OutputFolder")
before(job, "warm_up")
step = Engine.step
def first(engine):
    tokens = step(engine)
    stamp()
    print(*stamps, file=sys.__stdout__, flush=True)
    os._exit(0)
Engine.step = first
emssd.__main__.main()
"""


def seconds_of_parts(arguments: list[str]) -> list[float]:
    """Time the `PARTS` of one process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", PROGRAM, "progress=false", *arguments]
        environment = os.environ | {"STARTED": str(time.time())}
        run = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    stamps = [0.0, *map(float, run.stdout.splitlines()[-1].split())]
    return [later - earlier for earlier, later in pairwise(stamps)]


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("arguments", nargs="*", help="of python -m emssd")
    options = parser.parse_args()
    seconds_of_parts(options.arguments)  # fills the caches
    turns = [seconds_of_parts(options.arguments) for _ in range(options.repeats)]
    totals = [sum(turn) for turn in turns]
    lines = [
        (part, f"{statistics.median(column):.2f}") for part, column in zip(PARTS, zip(*turns, strict=True), strict=True)
    ]
    lines.append(("in all", f"{statistics.median(totals):.2f} ({min(totals):.2f} - {max(totals):.2f})"))
    show(f"from the start to the first token, median of {options.repeats}", ("part", "seconds"), lines)
    save(options.out, [dict(zip(PARTS, turn, strict=True)) for turn in turns])


if __name__ == "__main__":
    main()
