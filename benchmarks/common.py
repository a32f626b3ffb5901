"""Helpers of the programs: their command line, a clock, and how a result is kept."""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from emssd_lab.provenance import provenance
from rich.console import Console
from rich.table import Table

__all__ = ["best_ms", "in_large_pages", "make_parser", "save", "show"]


def make_parser(documentation: str | None, *, repeats: int | None = None) -> argparse.ArgumentParser:
    """A parser that prints a program's docstring, with the options ``--out`` and, given a default, ``--repeats``."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--out", type=Path, help="a JSON file for rows and provenance")
    return parser


def best_ms(run: Callable[[], object], times: int) -> float:
    """Milliseconds of the quickest of several runs. With one thread it is CPU time: other programs take none of it."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = []
    for _ in range(times):
        start = clock()
        run()
        seconds.append(clock() - start)
    return min(seconds) * 1e3


def in_large_pages(count: int) -> torch.Tensor:
    """``[count]`` ones in float32, in large pages where the system has any, as packed weights are."""
    memory = mmap.mmap(-1, count * 4)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1)


def save(out: Path | None, rows: Any, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """Write `rows`, and how they were made, to the JSON file `out`, if it is given."""
    if out is not None:
        kept = {"rows": rows, "provenance": provenance(torch.device(device), dtype)}
        out.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def show(title: str, columns: Iterable[str], lines: Iterable[Iterable[object]]) -> None:
    """Print a table."""
    table = Table(*columns, title=title)
    for line in lines:
        table.add_row(*map(str, line))
    Console(width=150).print(table)
