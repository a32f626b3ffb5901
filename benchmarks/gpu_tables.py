"""The tables of the GPU benchmark, from its results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from emssd_lab.costs import Costs
from gpu_products import TOKENS
from rich.console import Console
from rich.table import Table

__all__ = ["print_tables", "table_of_decoding"]

CAPTION = "A replay drafts for nothing, and is as often right as its τ says: verification allows that, no drafter does."


def print_tables(results: dict[str, Any], console: Console) -> None:
    """Print all tables that have rows."""
    for make in (table_of_steps, table_of_profiles, table_of_hosts, table_of_products, table_of_decoding):
        table = make(results)
        if table.row_count:
            console.print(table)


def _measured(results: dict[str, Any], kind: str, table: Table) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pieces of a kind, named without it. Failed pieces become rows of `table` only."""
    for name, row in results["pieces"].items():
        if name.startswith(kind) and "failed" in row:
            table.add_row(name.removeprefix(f"{kind} "), row["failed"])
        elif name.startswith(kind):
            yield name.removeprefix(f"{kind} "), row


def table_of_steps(results: dict[str, Any]) -> Table:
    """Milliseconds of verification steps beside the least that the card's own rates allow."""
    rate = results["machine"]
    table = Table("step", "ms", "floor, ms", "× floor", "plan", "forward", "verify (waits)", title="verification steps")
    for name, row in _measured(results, "step", table):
        batch, tokens, context = (int(word.partition("=")[2]) for word in name.split()[2:])
        costs = Costs(**{field: row[field] for field in Costs.__dataclass_fields__})
        moved, flops = costs.of_step(batch, batch * tokens, batch * (context + tokens))
        floor = max(moved / rate["bytes_per_second"], flops / rate["flops_per_second"])
        parts = (f"{1e3 * row[part + '_seconds']:.2f}" for part in ("plan", "forward", "verify"))
        seconds = row["seconds"]
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{1e3 * floor:.2f}", f"{seconds / floor:.2f}", *parts)
    return table


def table_of_profiles(results: dict[str, Any]) -> Table:
    """Milliseconds of a step; under the profiler, the device's busy and idle ones, launches and costliest kernels."""
    table = Table("step", "ms", "device busy", "idle", "launches", "costliest kernels, ms", title="profiles, per step")
    for name, row in _measured(results, "profile", table):
        costly = (f"{1e3 * kernel['seconds']:.2f} {kernel['name'][:60]}" for kernel in row["kernels"][:6])
        numbers = (f"{1e3 * row[part]:.2f}" for part in ("seconds", "busy_seconds", "idle_seconds"))
        table.add_row(name, *numbers, f"{row['launches']:.0f}", "\n".join(costly))
    return table


def table_of_hosts(results: dict[str, Any]) -> Table:
    """Milliseconds of steps and their phases, and one step from its begin in microseconds."""
    table = Table("run", "ms", "phases, ms", "one step, µs: at, for, what", title="the host in decoding")
    for name, row in _measured(results, "host", table):
        phases = (f"{1e3 * seconds:.2f} {phase}" for phase, seconds in row["phases"].items())
        step = (f"{start:.0f} {took:.0f} {name[:30]}" for start, took, name in row["one_step"][:40])
        table.add_row(name, f"{1e3 * row['seconds']:.2f}", "\n".join(phases), "\n".join(step))
    return table


def table_of_products(results: dict[str, Any]) -> Table:
    """Microseconds of matrix products by number of tokens, and the terabytes that they move in a second."""
    table = Table("product", *map(str, TOKENS), title="products by tokens, µs (TB/s)")
    for name, row in _measured(results, "products", table):
        cells = (row["by_tokens"].get(str(count)) for count in TOKENS)
        table.add_row(name, *(f"{1e6 * cell[0]:.1f} ({cell[1] / 1e12:.2f})" if cell else "" for cell in cells))
    return table


def table_of_decoding(results: dict[str, Any]) -> Table:
    """Tokens/s of decoding steps, and ratios to the same backend's greedy run and to Hugging Face."""
    speeds = {name: row["tokens_per_second"] for name, row in results["pieces"].items() if "tokens_per_second" in row}
    table = Table(
        "run", "tokens/s", "× own greedy", "× HF dynamic", "× HF static", "× loop", "τ",
        "padding per token", "right rows", title="decoding, without the steps that compute prompts", caption=CAPTION,
    )  # fmt: skip
    for name, row in _measured(results, "decode", table):
        shape, engine, kind, where = name.split(maxsplit=3)
        peers = [f"{engine} greedy" if kind.startswith("replay") else "", "hf dynamic", "hf static", "loop tokens=1"]
        bases = [speeds.get(f"decode {shape} {peer} {where}") for peer in peers]
        ratios = [f"{row['tokens_per_second'] / base:.2f}" if base else "" for base in bases]
        means = [f"{row[mean]:.2f}" if mean in row else "" for mean in ("acceptance_length", "padding_per_new_token")]
        compiled = " (compiled while timed)" if row.get("compiled_while_timed") else ""
        right = f"{row['equal_rows']}/{where.split()[0].partition('=')[2]}"
        table.add_row(name + compiled, f"{row['tokens_per_second']:.0f}", *ratios, *means, right)
    return table
