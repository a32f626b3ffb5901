"""A command that is killed at random, or whose output is damaged while it runs, and resumed.

Every row comes out once, with the tokens of a run that was left alone.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["damaged_output", "kill_and_resume"]

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


@cache
def _whole(seed: str) -> tuple[str, list[tuple[Any, ...]]]:
    """Prompts, and the rows that a run gives for them."""
    rng = random.Random(f"outputs {seed}")
    prompts = "\n".join(f"The word {rng.randrange(1000)} is" for _ in range(_NUM_PROMPTS))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prompts.txt").write_text(prompts)
        _finish(_start(Path(folder), "whole", ()))
        return prompts, sorted(_rows(Path(folder) / "whole"))


def damaged_output(seed: str) -> list[str]:
    """Damage the output of a command in mid-run: it must say so, and resume. Returns what is wrong."""
    rng = random.Random(f"damage {seed}")
    name = rng.choice(list(_DAMAGE))
    prompts, whole = _whole(seed.partition(".")[0])
    with tempfile.TemporaryDirectory() as folder:
        work, file = Path(folder), Path(folder) / "rows" / "generations.jsonl"
        (work / "prompts.txt").write_text(prompts)
        process, wanted = _start(work, "rows", ()), rng.randint(1, _NUM_PROMPTS // 2)
        while process.poll() is None and (not file.exists() or file.read_bytes().count(b"\n") < wanted):
            time.sleep(0.001)
        if process.poll() is not None:
            return [f"the command ended with {process.returncode} before its output was damaged"]
        _DAMAGE[name](file, rng)
        _, err = process.communicate()
        said = f"its output was {name} after {wanted} rows, and the command ended with {process.returncode}"
        if b"Traceback" in err:
            return [f"{said} and a traceback: {err.decode()[-300:]}"]
        if not process.returncode:
            return [] if file.exists() and _is_whole(file.parent, whole) else [f"{said}, with rows missing"]
        resumed = _start(work, "rows", ("resume=true",))
        _, err = resumed.communicate()
        if resumed.returncode or not _is_whole(file.parent, whole):
            return [f"{said}; resumed, it ended with {resumed.returncode}, and not all rows are right: "
                    f"{err.decode()[-300:]}"]  # fmt: skip
    return []


def _is_whole(folder: Path, rows: list[tuple[Any, ...]]) -> bool:
    try:
        return sorted(_rows(folder)) == rows
    except (ValueError, KeyError):  # a line is none of emssd's
        return False


def _cut(file: Path, rng: random.Random) -> None:
    with file.open("r+b") as opened:
        opened.truncate(rng.randrange(file.stat().st_size))


def _replaced(file: Path, rng: random.Random) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    other = file.with_name("other")
    other.write_bytes(b"".join(lines[: rng.randrange(len(lines))]))
    other.replace(file)


_DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "cut": _cut,
    "emptied": lambda file, rng: file.write_bytes(b"") and None,
    "removed": lambda file, rng: file.unlink(),
    "replaced": _replaced,
    "removed with its folder": lambda file, rng: shutil.rmtree(file.parent),
}


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
