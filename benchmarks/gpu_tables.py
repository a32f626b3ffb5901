"""The tables of the GPU benchmark, from its results."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from emssd.model.costs import Costs

__all__ = ["PAPER_LLMA", "print_tables", "table_of_decoding", "table_of_profiles", "table_of_steps"]

PAPER_LLMA = {2: 3.50, 4: 2.83, 8: 2.17, 16: 1.63, 24: 1.41}  # OPT-6.7b, speed-up over its greedy decoding
CAPTION = (
    "paper's ×: LLMA of the paper over the paper's greedy decoding, with a real drafter, real text and its own card. "
    "The replay beside it drafts for nothing and is right as often as its τ says, which is no acceptance that the "
    "paper prints; so the ratios say what verification allows, not that a drafter reaches it."
)


def print_tables(results: dict[str, Any], console: Console) -> None:
    """Print all tables that have rows."""
    for table in (table_of_steps(results), table_of_profiles(results), table_of_decoding(results)):
        if table.row_count:
            console.print(table)


def table_of_steps(results: dict[str, Any]) -> Table:
    """Milliseconds of verification steps beside the least that the card's own rates allow."""
    rate = results["machine"]
    table = Table("step", "ms", "floor, ms", "× floor", "plan", "forward", "verify (waits)", title="verification steps")
    for name, row in results["pieces"].items():
        if not name.startswith("step"):
            continue
        if "failed" in row:
            table.add_row(name[5:], row["failed"])
            continue
        batch, tokens, context = (int(word.partition("=")[2]) for word in name.split()[3:])
        costs = Costs(**{field: row[field] for field in Costs.__dataclass_fields__})
        moved, flops = costs.of_step(batch, batch * tokens, batch * (context + tokens))
        floor = max(moved / rate["bytes_per_second"], flops / rate["flops_per_second"])
        parts = (f"{1e3 * row[part + '_seconds']:.2f}" for part in ("plan", "forward", "verify"))
        seconds = row["seconds"]
        table.add_row(name[5:], f"{1e3 * seconds:.2f}", f"{1e3 * floor:.2f}", f"{seconds / floor:.2f}", *parts)
    return table


def table_of_profiles(results: dict[str, Any]) -> Table:
    """Milliseconds of a step; under the profiler, the device's busy and idle ones, launches and costliest kernels."""
    table = Table("step", "ms", "device busy", "idle", "launches", "costliest kernels, ms", title="profiles, per step")
    for name, row in results["pieces"].items():
        if not name.startswith("profile"):
            continue
        if "failed" in row:
            table.add_row(name[8:], row["failed"])
            continue
        costly = (f"{1e3 * kernel['seconds']:.2f} {kernel['name'][:60]}" for kernel in row["kernels"][:6])
        numbers = (f"{1e3 * row[part]:.2f}" for part in ("seconds", "busy_seconds", "idle_seconds"))
        table.add_row(name[8:], *numbers, f"{row['launches']:.0f}", "\n".join(costly))
    return table


def table_of_decoding(results: dict[str, Any]) -> Table:
    """Tokens/s of decoding steps, and ratios to the same backend's greedy run and to Hugging Face."""
    found = results["pieces"]
    table = Table(
        "run", "tokens/s", "× own greedy", "paper's ×", "× HF dynamic", "× HF static", "τ", "padding per token",
        "right rows", title="decoding, without the steps that compute prompts", caption=CAPTION,
    )  # fmt: skip
    for name, row in found.items():
        if not name.startswith("decode"):
            continue
        if "failed" in row:
            table.add_row(name[7:], row["failed"])
            continue
        _, shape, engine, kind, *where = name.split()
        speed, batch = row["tokens_per_second"], int(where[0].partition("=")[2])

        def over(*run: str, shape: str = shape, where: list[str] = where, speed: float = speed) -> str:
            base = found.get(" ".join(["decode", shape, *run, *where]), {}).get("tokens_per_second")
            return f"{speed / base:.2f}" if base else ""

        paper = PAPER_LLMA.get(batch) if (shape, engine, kind[:6]) == ("opt-6.7b", "flashinfer", "replay") else None
        compiled = " (compiled while timed)" if row.get("compiled_while_timed") else ""
        table.add_row(
            name[7:] + compiled,
            f"{speed:.0f}",
            over(engine, "greedy") if kind.startswith("replay") else "",
            f"{paper:.2f}" if paper else "",
            over("hf", "dynamic"),
            over("hf", "static"),
            f"{row['acceptance_length']:.2f}" if "acceptance_length" in row else "",
            f"{row['padding_per_new_token']:.2f}" if "padding_per_new_token" in row else "",
            f"{row['equal_rows']}/{batch}",
        )
    return table
