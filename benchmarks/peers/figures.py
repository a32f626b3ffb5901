"""Figures of the cells that were measured, and the Markdown tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

__all__ = ["Cell", "figures", "speed_table"]

Cell = tuple[str, str, int]  # peer, mode, batch size
Tokens = list[list[int]]


def figures(
    answers: dict[Cell, list[dict[str, Any]]], references: dict[str, Tokens], failed: dict[Cell, str]
) -> list[dict[str, Any]]:
    """One row for each cell, from its runners' answers: speeds of all repeats, and in how many rows tokens are equal.

    *Own greedy* tokens are those of the same engine at the smallest batch size that it ran.

    Args:
        answers: of each cell, one for each repeat.
        references: tokens of each row as the references have them, by name.
        failed: why cells have no answers.
    """
    rows = []
    for (peer, mode, batch), repeats in answers.items():
        outputs = [answer["tokens"] for answer in repeats]
        speeds = [sum(map(len, answer["tokens"])) / answer["seconds"] for answer in repeats]
        own = min((cell for cell in answers if cell[:2] == (peer, "greedy")), default=(peer, mode, batch))
        greedy = answers[own] if own != (peer, mode, batch) else None
        rows.append(
            {
                "peer": peer,
                "mode": mode,
                "batch_size": batch,
                "seconds": [answer["seconds"] for answer in repeats],
                "num_tokens": [sum(map(len, tokens)) for tokens in outputs],
                "tokens_per_second": speeds,
                "median": statistics.median(speeds),
                "num_rows": len(outputs[-1]),
                "equal_rows": {name: num_equal(outputs[-1], tokens) for name, tokens in references.items()},
                "equal_to_own_greedy": num_equal(outputs[-1], greedy[-1]["tokens"]) if greedy else None,
                "equal_in_all_repeats": min(num_equal(outputs[-1], tokens) for tokens in outputs),
                "details": [answer["details"] for answer in repeats],
            }
        )
    rows += [
        {"peer": peer, "mode": mode, "batch_size": batch, "failed": why} for (peer, mode, batch), why in failed.items()
    ]
    return rows


def num_equal(ours: Tokens, theirs: Tokens) -> int:
    """The number of rows that have the same tokens."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def speed_table(rows: list[dict[str, Any]]) -> str:
    """Tokens/s and exact rows of all cells; the ratio is that of medians of interleaved runs."""
    emssd = {(row["mode"], row["batch_size"]): row["median"] for row in measured(rows) if row["peer"] == "emssd"}
    references = next((list(row["equal_rows"]) for row in measured(rows)), [])
    columns = ["batch", "mode", "engine", "tokens/s", "min – max", "emssd ÷ it"]
    columns += [*(f"= {name}" for name in references), "= own greedy"]
    lines = []
    for row in rows:
        line = [str(row["batch_size"]), row["mode"], row["peer"]]
        if "failed" in row:
            line += ["failed: " + row["failed"].splitlines()[0].replace("|", "\\|")]
        else:
            ours, speeds, total = emssd.get((row["mode"], row["batch_size"])), row["tokens_per_second"], row["num_rows"]
            line += [f"{row['median']:.0f}", f"{min(speeds):.0f} – {max(speeds):.0f}"]
            line += [f"{ours / row['median']:.2f}" if ours and row["peer"] != "emssd" else ""]
            greedy = row["equal_to_own_greedy"]
            counts = [*row["equal_rows"].values(), *([] if greedy is None else [greedy])]
            line += [f"{count}/{total}" for count in counts]
        lines.append(line + [""] * (len(columns) - len(line)))
    return markdown(columns, lines)


def measured(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "failed" not in row]


def markdown(columns: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [columns, ["---"] * len(columns), *lines])
