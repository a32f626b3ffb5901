"""All planted faults, and their table in the decision note."""

from __future__ import annotations

from pathlib import Path

from .fault import read

__all__ = ["FAULTS", "as_markdown", "function_of"]

FAULTS = tuple(fault for path in sorted(Path(__file__).parent.glob("faults/*.txt")) for fault in read(path))


def function_of(test: str) -> str:
    """The name of a test without its parameters."""
    return test.partition("[")[0]


def as_markdown() -> str:
    """The table of faults, by room."""
    lines = ["| Room | Fault | Caught by |", "| --- | --- | --- |"]
    for fault in sorted(FAULTS, key=lambda fault: fault.room):
        caught_by = ", ".join(f"`{function_of(test).rpartition('/')[2]}`" for test in fault.caught_by)
        lines.append(f"| {fault.room} | {fault.name} | {caught_by} |")
    return "\n".join(lines)
