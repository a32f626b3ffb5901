"""All planted faults, and their table in the decision note."""

from __future__ import annotations

from . import bits, drafters, engine, gpu, grammar, heads, memory, sampling, states

__all__ = ["FAULTS", "as_markdown", "function_of"]

FAULTS = (*engine.FAULTS, *memory.FAULTS, *drafters.FAULTS, *heads.FAULTS, *sampling.FAULTS)
FAULTS += (*states.FAULTS, *grammar.FAULTS, *bits.FAULTS, *gpu.FAULTS)


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
