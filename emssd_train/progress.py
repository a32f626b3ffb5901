"""The progress of a training: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Bar"]

_LOG_SECONDS = 30.0


class Bar:
    """The progress of one part.

    Args:
        console: where it is shown.
        title: of the part.
        total: of what is to be done.
    """

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console, self._title, self._total, self._logged = console, title, total, time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
        )
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task(title, total=total, said="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def tell(self, done: int, said: str = "") -> None:
        """So much is done."""
        self._progress.update(self._task, completed=done, total=self._total, said=said)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._logged >= _LOG_SECONDS or done == self._total):
            self._logged = now
            self._console.print(f"{self._title} {done}/{self._total} {said}".rstrip(), highlight=False)

    def tell_step(self, done: int, total: int, loss: float | None) -> None:
        """So many of `total` steps are done, with this loss."""
        self._total = total
        self.tell(done, "" if loss is None else f"loss {loss:.3f}")
