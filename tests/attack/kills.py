"""A command that is killed at random and resumed: every row once, with the tokens of a run that was left alone."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["kill_and_resume"]

_NUM_PROMPTS = 60


def kill_and_resume(seed: int, num_kills: int) -> int:
    """Decode with the embedded model, and kill it that many times. Returns 1 if a row is lost, doubled or other."""
    rng = random.Random(f"kills {seed}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        lines = (f"{rng.choice(('The', 'A', 'In', 'For'))} word {rng.randrange(1000)} is" for _ in range(_NUM_PROMPTS))
        (work / "prompts.txt").write_text("\n".join(lines))
        how = rng.choice(((), ("sampling=sampled", f"sampling.seed={seed}")))
        start = time.monotonic()
        _finish(_start(work, "whole", how))
        whole, took = _rows(work / "whole"), time.monotonic() - start
        for _ in range(num_kills):
            drafter, backend = rng.choice(("llma", "none", "pld", "suffix")), rng.choice(("ragged", "padded"))
            process = _start(work, "killed", (f"drafter={drafter}", f"backend={backend}", "resume=true", *how))
            time.sleep(rng.uniform(0.3, 1.0) * took)
            process.send_signal(signal.SIGKILL)
            process.wait()
        _finish(_start(work, "killed", ("resume=true", *how)))
        killed = _rows(work / "killed")
    wrong = sorted(whole) != sorted(killed)
    print(f"kills: {num_kills} times, {len(killed)} rows of {len(whole)}, {'WRONG' if wrong else 'as if left alone'}")
    return int(wrong)


def _start(work: Path, folder: str, more: tuple[str, ...]) -> subprocess.Popen[bytes]:
    options = ["data=text", "data.path=prompts.txt", "max_new_tokens=40", "batch_size=4", f"output_dir={folder}"]
    command = [sys.executable, "-m", "emssd", *options, *more]
    return subprocess.Popen(command, cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _finish(process: subprocess.Popen[bytes]) -> None:
    _, err = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the command ended with {process.returncode}: {err.decode()}")


def _rows(folder: Path) -> list[tuple[Any, ...]]:
    text = (folder / "generations.jsonl").read_text()
    return [(row["id"], row["token_ids"], row["text"]) for row in map(json.loads, text.splitlines())]
