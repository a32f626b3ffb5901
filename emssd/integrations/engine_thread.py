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
from emssd.sequences import Generation, Request, Row

__all__ = ["EngineThread"]


class EngineThread:
    """Steps `engine` in a thread of its own as long as there is work, so that its batch stays full across callers.

    From now on, nobody else may use it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[tuple[Request, Future[Generation]] | None] = queue.SimpleQueue()
        self._futures: dict[str, Future[Generation]] = {}
        self._ids = count()
        self._end: EmssdError | None = None  # why the thread has ended
        self._thread = Thread(target=self._run, name="emssd-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> list[Future[Generation]]:
        """The outcomes of all samples of `request`. Other requests may have the same id; the text depends on it alone.

        A future raises what kept its row from being decoded: a `PromptError`, say, or whatever a step has failed with.
        One that is cancelled gives up its row.
        """
        futures = []
        for sample in request.samples():
            unique = replace(sample, request_id=str(next(self._ids)), sample_of=sample.prompt_id)
            future: Future[Generation] = Future()
            self._inbox.put((unique, future))
            futures.append(future)
        if self._end is not None:  # the thread looks into its inbox no more
            self._fail_inbox(self._end)
        return futures

    def close(self) -> None:
        """End the thread once what was submitted is done."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_open, end = True, EmssdError("this engine was closed; make another one")
        try:
            while is_open or self.engine.has_work:
                is_open = self._take_new() and is_open
                try:
                    self._drop_cancelled()
                    finished = self.engine.step()
                except BaseException as error:  # it is raised where somebody waits for it
                    self._fail_rows(error)
                    with suppress(EmssdError):  # a drafter that cannot forget; what has failed before it matters more
                        self.engine.clear()  # the next request finds an idle engine
                    continue
                for sequence in finished:
                    self._finish(sequence)
        except BaseException as error:
            end = EmssdError(f"this engine has ended ({type(error).__name__}: {error}); make another one")
            raise
        finally:  # nobody waits for a thread that is no more
            self._end = end
            self._fail_rows(end)
            self._fail_inbox(end)

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
            except BaseException as error:  # as above
                _settle(future, error)
            else:
                self._futures[request.request_id] = future

    def _drop_cancelled(self) -> None:
        if gone := [name for name, future in self._futures.items() if future.cancelled()]:
            for name in gone:
                self._futures.pop(name).set_running_or_notify_cancel()
            self.engine.clear(gone)

    def _finish(self, sequence: Row) -> None:
        future = self._futures.pop(sequence.request_id)
        try:
            (done := Generation.of(sequence, self.engine.tokenizer)).check()
            _settle(future, done)
        except Exception as error:  # of the row, or of the tokenizer
            _settle(future, error)

    def _fail_rows(self, error: BaseException) -> None:
        for future in self._futures.values():
            _settle(future, error)
        self._futures = {}

    def _fail_inbox(self, error: BaseException) -> None:
        with suppress(queue.Empty):
            while True:
                if (item := self._inbox.get_nowait()) is not None:
                    _settle(item[1], error)


def _settle(future: Future[Generation], outcome: Generation | BaseException) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
