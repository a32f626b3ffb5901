"""The paper's figures, from ``paper.toml``."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["Paper", "paper"]


class Paper(msgspec.Struct, frozen=True):
    """The tables of the file, under its names."""

    step_rows: int
    step_ms: dict[int, float]
    experiments: dict[str, dict[str, Any]]
    tasks: dict[str, str]
    speedups: list[dict[str, Any]]

    def beside(self, experiment: str, model: str, task: str) -> tuple[str, dict[str, dict[int, float]]]:
        """The printed model and data for rows of this model, and their speed-ups by method and batch size, if any."""
        if experiment not in self.experiments:
            return "", {}
        printed = self.experiments[experiment]
        model = model if model in printed["models"] else printed["models"][0]
        data = self.tasks.get(task, "CNN/Daily Mail") if experiment == "datasets" else "CNN/Daily Mail"
        key = {"drafter": printed["drafter"], "model": model, "data": data}
        tables = (table["methods"] for table in self.speedups if key.items() <= table.items())
        methods: dict[str, dict[str, float]] = next(tables, {})
        by_size = {name: {int(size): gain for size, gain in gains.items()} for name, gains in methods.items()}
        return f"{model.replace('opt', 'OPT')}, {data}", by_size


@cache
def paper() -> Paper:
    """The file, read once."""
    return msgspec.toml.decode(Path(__file__).with_name("paper.toml").read_bytes(), type=Paper)
