"""`SharedEngine`: one engine for all calls of an event loop, each with rows of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import TypeVar

from emssd.decoding.engine import Engine
from emssd.errors import EmssdError
from emssd.sequences import Request, Row

__all__ = ["SharedEngine"]

_Result = TypeVar("_Result")
_Watch = Callable[[Row], None]


class SharedEngine:
    """Decodes the rows of all calls in one batch. A thread of its own does all that touches the engine, in order.

    So rows are added, and given up, between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._step: asyncio.Future[None] | None = None  # the latest
        self._watched = dict[int, tuple[list[Row], _Watch]]()
        self._names, self._is_closed = count(), False

    def close(self) -> None:
        """Let all calls end with an error after this step."""
        self._is_closed = True

    async def between_steps(self, do: Callable[[], _Result]) -> _Result:
        """The result of `do`, which may touch the engine and its tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, do)

    async def decode(self, requests: Callable[[], Iterable[Request]], watch: _Watch) -> AsyncGenerator[list[Row], None]:
        """Decode the samples that `requests` gives between two steps; yields their rows once they are queued and after
        each step, until all have finished. To close the iterator gives them up.

        Args:
            watch: gets each row after each step, in the engine's thread, to be read only.

        Raises:
            EmssdError: the requests cannot be decoded, or `close` was called.
            Exception: what kept a step from being done. It ends all calls that took part in it.
        """
        rows: list[Row] = []
        try:
            await self.between_steps(lambda: self._begin(rows, requests(), watch))
            yield rows  # steps of other calls may finish them before this call goes on
            while any(row.finish_reason is None for row in rows):
                if self._is_closed:
                    raise EmssdError("the server is shutting down; ask again when it is back")
                if self._step is None or self._step.done():
                    self._step = asyncio.ensure_future(self.between_steps(self._take_step))
                await asyncio.shield(self._step)
                yield rows
        finally:
            self._thread.submit(self._end, rows)

    def _begin(self, rows: list[Row], requests: Iterable[Request], watch: _Watch) -> None:
        """Queue the rows. Each is sampled as if `Engine.generate` had its prompt alone."""
        self._watched[id(rows)] = rows, watch
        for request in requests:
            rows += self.engine.add(replace(request, request_id=str(next(self._names)), sample_of="0"))

    def _take_step(self) -> None:
        self.engine.step_in_memory()
        for rows, watch in self._watched.values():
            for row in rows:
                watch(row)

    def _end(self, rows: list[Row]) -> None:
        self._watched.pop(id(rows), None)
        if names := [row.request_id for row in rows if row.finish_reason is None]:
            self.engine.clear(names)
