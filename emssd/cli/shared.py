"""`SharedEngine`: one engine for all calls of an event loop, each with rows of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TypeVar

from emssd.decoding.engine import Engine
from emssd.errors import EmssdError, PluginError
from emssd.sequences import Request, Row

__all__ = ["ClosedError", "SharedEngine"]

_Result = TypeVar("_Result")
_Watch = Callable[[Row], None]


class ClosedError(EmssdError):
    """The engine takes no more steps."""


class SharedEngine:
    """Decodes the rows of all calls in one batch. A thread of its own does all that touches the engine, in order.

    So a call adds rows, or gives them up, between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._step: asyncio.Future[None] | None = None  # the latest
        self._watched: list[tuple[list[Row], _Watch | None]] = []
        self._names, self._is_closed = count(), False

    def close(self) -> None:
        """Let all calls end with `ClosedError` after this step."""
        self._is_closed = True

    async def between_steps(self, do: Callable[[], _Result]) -> _Result:
        """The result of `do`, which may touch the engine and its tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, do)

    async def decode(
        self, requests: Callable[[], Iterable[Request]], watch: _Watch | None = None
    ) -> AsyncIterator[list[Row]]:
        """Decode what `requests` gives between two steps; yields its rows after each step, until all have finished.

        Closing the iterator gives up the rows that have not.

        Args:
            watch: gets each row after each step, in the engine's thread, to be read only.

        Raises:
            Exception: what kept the requests, or a step, from being done. It ends all calls that took part in the step.
        """
        rows: list[Row] = []
        try:
            await self.between_steps(lambda: self._begin(rows, requests, watch))
            while any(row.finish_reason is None for row in rows):
                if self._is_closed:
                    raise ClosedError("the server is shutting down; ask again when it is back")
                if self._step is None or self._step.done():
                    self._step = asyncio.ensure_future(self.between_steps(self._take_step))
                await asyncio.shield(self._step)
                yield rows
        finally:
            self._thread.submit(self._end, rows)

    def _begin(self, rows: list[Row], requests: Callable[[], Iterable[Request]], watch: _Watch | None) -> None:
        """Queue the rows. The text of one depends on the id of its prompt, not on the name that it has here."""
        for request in requests():
            row = self.engine.row(replace(request, request_id=str(next(self._names)), sample_of=request.prompt_id))
            self.engine.scheduler.add(row)
            rows.append(row)
        self._watched.append((rows, watch))

    def _take_step(self) -> None:
        try:
            self.engine.step()
        except BaseException:
            with suppress(PluginError):  # what ended the step matters more than a drafter that cannot forget
                self.engine.clear()
            raise
        for rows, watch in self._watched:
            for row in rows if watch is not None else ():
                watch(row)

    def _end(self, rows: list[Row]) -> None:
        self._watched = [(others, watch) for others, watch in self._watched if others is not rows]
        if names := [row.request_id for row in rows if row.finish_reason is None]:
            self.engine.clear(names)
