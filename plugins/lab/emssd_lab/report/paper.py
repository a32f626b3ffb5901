"""The paper's figures, from ``paper.toml``."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["CNN_DAILYMAIL", "Paper", "paper"]

CNN_DAILYMAIL = "CNN/Daily Mail"


class Paper(msgspec.Struct, frozen=True):
    """The tables of the file, under its names."""

    step_rows: int
    step_ms: dict[int, float]
    padding: list[dict[str, Any]]
    datasets: list[dict[str, Any]]
    speedups: list[dict[str, Any]]

    def methods(self, drafter: str, model: str, data: str) -> dict[str, dict[int, float]]:
        """The speed-ups of a drafter, model and data by method and batch size; none where nothing is printed."""
        key = {"drafter": drafter, "model": model, "data": data}
        tables = (table["methods"] for table in self.speedups if key.items() <= table.items())
        methods: dict[str, dict[str, float]] = next(tables, {})
        return {name: {int(size): speed for size, speed in sizes.items()} for name, sizes in methods.items()}


@cache
def paper() -> Paper:
    """The file, read once."""
    return msgspec.toml.decode(Path(__file__).with_name("paper.toml").read_bytes(), type=Paper)
