"""An engine that runs by itself: requests come at any time, from any thread, and each has a future for its outcome."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import count
from threading import Thread

from emssd.decoding.engine import Engine
from emssd.errors import EmssdError
from emssd.sequences import Generation, Request

__all__ = ["EngineThread"]


class EngineThread:
    """Steps `engine` in a thread of its own as long as there is work, so that its batch stays full across callers.

    Args:
        engine: from now on, nobody else may use it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[tuple[Request, Future[Generation]] | None] = queue.SimpleQueue()
        self._futures: dict[str, Future[Generation]] = {}
        self._ids = count()
        self._thread = Thread(target=self._run, name="emssd-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> list[Future[Generation]]:
        """The outcomes of all samples of `request`. Other requests may have the same id; the text depends on it alone.

        A future raises what kept its row from being decoded: a `PromptError`, say, or whatever a step has failed with.
        """
        futures = []
        for sample in request.samples():
            unique = replace(sample, request_id=str(next(self._ids)), sample_of=sample.prompt_id)
            future: Future[Generation] = Future()
            self._inbox.put((unique, future))
            futures.append(future)
        return futures

    def close(self) -> None:
        """End the thread once what was submitted is done."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open or self.engine.has_work:
            is_open = self._take_new() and is_open
            try:
                finished = self.engine.step()
            except BaseException as error:  # it is raised where somebody waits for it
                self._fail_all(error)
                continue
            for sequence in finished:
                self._futures.pop(sequence.request_id).set_result(Generation.of(sequence, self.engine.tokenizer))

    def _take_new(self) -> bool:
        """Hand over what has come since the last step; without work, wait for it. Whether more may come."""
        while True:
            try:
                item = self._inbox.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if item is None:
                return False
            request, future = item
            try:
                self.engine.add(request)
            except EmssdError as error:
                future.set_exception(error)
            else:
                self._futures[request.request_id] = future

    def _fail_all(self, error: BaseException) -> None:
        """No row of a failed step is left, so that the next request finds an idle engine."""
        failed, self._futures = self._futures, {}
        for future in failed.values():
            future.set_exception(error)
        with suppress(EmssdError):  # a drafter that cannot forget; what has failed before it matters more
            self.engine.clear()
