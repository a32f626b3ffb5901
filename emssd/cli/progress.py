"""Live figures of a run: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

if TYPE_CHECKING:  # it brings torch, which --help does not need
    from emssd.metrics.stats import RunReport

__all__ = ["Bar", "show_messages", "time_left"]


_LOG_SECONDS = 60.0


def show_messages(console: Console) -> None:
    """Show on `console` what the package says while it prepares: that it builds or compiles something, say."""

    class _OnConsole(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(record.getMessage())

    logger = logging.getLogger("emssd")
    logger.handlers, logger.propagate = [_OnConsole()], False
    logger.setLevel(logging.INFO)


class Bar:
    """A bar on a terminal, a line now and then in a log file. It tells the time that is left.

    Args:
        done: what was done before.
        batch: so many are worked on at once; those that are not done count as half done for the time that is left.
    """

    def __init__(
        self, console: Console, title: str, total: int, *, done: int = 0, batch: int = 0, show: bool = True
    ) -> None:
        self._console, self._title, self._total, self._before, self._done = console, title, total, done, done
        self._batch = batch
        self._log_seconds = _LOG_SECONDS if show and not console.is_terminal else float("inf")
        what, figures = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[live]}")
        columns = (what, BarColumn(), MofNCompleteColumn(), figures, TextColumn("{task.fields[left]}"))
        to_terminal = sys.stdout is not None and sys.stdout.isatty()  # else what is printed meanwhile goes its own way
        self._progress = Progress(*columns, console=console, disable=not show, redirect_stdout=to_terminal)
        self._task = self._progress.add_task(title, total=total, completed=done, live="", left="")
        self._start = self._logged = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def tell(self, done: int, live: str = "", total: int | None = None) -> None:
        """So much is done, with these figures by now; `total` is what there is to do, if that is known only now.

        The time that is left is then measured from now on.
        """
        if total is not None and total != self._total:
            self._total, self._before, self._start = total, done, time.monotonic()
        self._done, now = done, time.monotonic()
        # By the rows that this run has finished: rich's own column forgets rows that took longer than half a minute.
        left = time_left(now - self._start, done - self._before, self._total - done, self._batch)
        self._progress.update(self._task, completed=done, total=self._total, live=live, left=left)
        if now - self._logged >= self._log_seconds:
            self._logged = now
            self._console.print(f"{self._title} {', '.join(filter(None, (f'{done}/{self._total}', live, left)))}")

    def row_done(self, report: RunReport) -> None:
        """One more row is done, with these figures by now."""
        self.tell(self._done + 1, f"{report.tokens_per_second:.0f} tokens/s, τ {report.mean_acceptance_length:.2f}")


def time_left(elapsed: float, done: float, left: float, batch: float = 0) -> str:
    """``0:01:30 left``, if rows go on taking as long as the `done` ones took; nothing before the first.

    `batch` of the rows that are left are half done.
    """
    half = min(batch, left) / 2
    return f"{timedelta(seconds=round(elapsed / (done + half) * (left - half)))} left" if done else ""
