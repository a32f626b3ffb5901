"""Live figures of a run: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

if TYPE_CHECKING:  # it brings torch, which --help does not need
    from emssd.model.compile.compilable import Compiling

__all__ = ["Bar", "loading_shown", "show_messages", "time_left"]

_SOON = 1.5  # seconds; what is done by then needs no bar


def show_messages(console: Console, *, bars: bool = True) -> None:
    """Show on `console` what the package says while it prepares: that it builds or compiles something, say.

    On a terminal, unless `bars` is false, a bar moves while something is compiled.
    """
    logger = logging.getLogger("emssd")
    logger.handlers, logger.propagate = [_OnConsole(console, bars and console.is_terminal)], False
    logger.setLevel(logging.INFO)


class _OnConsole(logging.Handler):
    def __init__(self, console: Console, bars: bool) -> None:
        super().__init__()
        self._console, self._bars = console, bars
        self._live = Live(console=console)

    def emit(self, record: logging.LogRecord) -> None:
        work: Compiling | None = vars(record).get("compiling")
        self._live.stop()
        if work is None or work.ended or not self._bars:
            self._console.print(record.getMessage())
        else:
            self._live = Live(
                get_renderable=lambda: f"{work.title} {'━' * round(40 * work.share):<40} {work.clock}",
                console=self._console,
                transient=True,
            )
            self._live.start(refresh=True)


class Bar:
    """A bar on a terminal, a line now and then in a log file. It tells the time that is left.

    Args:
        done: what was done before.
        batch: so many are worked on at once; until they are done, they count as half done for the time that is left.
        log_seconds: how often a line is written where there is no terminal.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        total: int,
        *,
        done: int = 0,
        batch: int = 0,
        show: bool = True,
        log_seconds: float = 60.0,
    ) -> None:
        self._console, self._title, self._total, self._before = console, title, total, done
        self._batch = batch
        self._log_seconds = log_seconds if show and not console.is_terminal else float("inf")
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
        now = time.monotonic()
        # By the rows that this run has finished: rich's own column forgets rows that took longer than half a minute.
        left = time_left(now - self._start, done - self._before, self._total - done, self._batch)
        self._progress.update(self._task, completed=done, total=self._total, live=live, left=left)
        if now - self._logged >= self._log_seconds:
            self._logged = now
            self._console.print(f"{self._title} {', '.join(filter(None, (f'{done}/{self._total}', live, left)))}")


@contextmanager
def loading_shown(console: Console, *, show: bool = True) -> Iterator[None]:
    """Within, a `Bar` tells how many of its weights a model has loaded, unless that is soon done."""
    from transformers.utils import logging as theirs

    def counted(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        wanted = show and options.get("desc") == "Loading weights"
        return _counted(console, args[0]) if wanted else make(*args, **options)

    before = theirs.set_tqdm_hook(counted)
    try:
        yield
    finally:
        theirs.set_tqdm_hook(before)


def _counted(console: Console, weights: Collection[Any]) -> Iterator[Any]:
    start, bar = time.monotonic(), None
    with ExitStack() as stack:
        for number, weight in enumerate(weights, 1):
            yield weight
            if bar is None and time.monotonic() - start >= _SOON:
                bar = stack.enter_context(Bar(console, "loading", len(weights), log_seconds=5))
            if bar is not None:
                bar.tell(number)


def time_left(elapsed: float, done: float, left: float, batch: float = 0) -> str:
    """``0:01:30 left``, if rows go on taking as long as the `done` ones took; nothing before the first.

    `batch` of the rows that are left are half done.
    """
    half = min(batch, left) / 2
    return f"{timedelta(seconds=round(elapsed / (done + half) * (left - half)))} left" if done else ""
