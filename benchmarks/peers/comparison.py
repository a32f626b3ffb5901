"""Runs the cells of a comparison: a process for each, repeats interleaved; and the references for their tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from peers.figures import Cell
from peers.protocol import Request
from peers.workers import PeerError, Setting, Worker
from rich.console import Console
from rich.progress import Progress

__all__ = ["Comparison", "references_of"]


def references_of(
    request: Request, setting: Setting, logs: Path, console: Console, peer: str = "hf"
) -> dict[str, list[list[int]]]:
    """Greedy tokens of Hugging Face `generate` at batch 1, in the precision of the comparison and in float32.

    Those of another `peer`, in batches and in float32 alone, take less time where the model is large.
    """
    references = {}
    batch_size, dtypes = (1, [setting.dtype, "float32"]) if peer == "hf" else (16, ["float32"])
    for dtype in dict.fromkeys(dtypes):
        with console.status(f"reference: {peer} at batch {batch_size} in {dtype}"):
            worker = Worker(peer, replace(setting, dtype=dtype, options={}), logs / f"reference-{dtype}.log")
            try:
                name = "HF" if peer == "hf" else peer
                references[f"{name} {dtype}"] = worker.ask(replace(request, batch_size=batch_size))["tokens"]
            finally:
                worker.close()
    return references


class Comparison:
    """All cells of one batch size, each in its own process, with interleaved repeats.

    Args:
        request: prompts and limits.
        setting: models and the like.
        logs: folder for the logs of the processes.
        progress: where the state is shown.
    """

    def __init__(self, request: Request, setting: Setting, logs: Path, progress: Progress) -> None:
        self.request, self.setting, self.logs, self.progress = request, setting, logs, progress
        self.answers: dict[Cell, list[dict[str, Any]]] = {}
        self.failed: dict[Cell, str] = {}
        self.versions: dict[str, dict[str, str]] = {}

    def run(self, cells: list[Cell], repeats: int) -> None:
        """Measure `cells`, which have the same batch size."""
        task = self.progress.add_task(f"batch {cells[0][2]}", total=len(cells) * (repeats + 1))
        workers: dict[Cell, Worker] = {}
        try:
            for cell in cells:
                self._start(cell, workers)
                self.progress.advance(task)
            for repeat in range(repeats):
                turn = list(workers)
                first = repeat % max(len(turn), 1)
                for cell in turn[first:] + turn[:first]:
                    self._measure(cell, workers)
                    self.progress.advance(task)
        finally:
            for worker in workers.values():
                worker.close()
            self.progress.remove_task(task)

    def _start(self, cell: Cell, workers: dict[Cell, Worker]) -> None:
        peer, mode, batch = cell
        few = replace(self.request, prompts=self.request.prompts[: max(8, 2 * batch)])  # to warm up
        try:
            workers[cell] = Worker(peer, self.setting, self.logs / f"{peer}-{mode}-{batch}.log")
            self.versions[peer] = workers[cell].versions
            workers[cell].ask(replace(few, mode=mode, batch_size=batch))
        except PeerError as error:
            self._fail(cell, workers, error)

    def _measure(self, cell: Cell, workers: dict[Cell, Worker]) -> None:
        _, mode, batch = cell
        try:
            answer = workers[cell].ask(replace(self.request, mode=mode, batch_size=batch))
        except PeerError as error:
            self._fail(cell, workers, error)
        else:
            self.answers.setdefault(cell, []).append(answer)

    def _fail(self, cell: Cell, workers: dict[Cell, Worker], error: PeerError) -> None:
        peer, mode, batch = cell
        self.progress.console.print(f"{peer}, {mode}, batch {batch} failed: {error}", style="red", highlight=False)
        self.failed[cell] = str(error)
        self.answers.pop(cell, None)
        if worker := workers.pop(cell, None):
            worker.close()
