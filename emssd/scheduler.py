"""Who runs in the next step, and with how large a draft budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable

from emssd.sequence import Batch, Request, Sequence

__all__ = ["Scheduler", "StaticScheduler"]


class Scheduler(ABC):
    """Holds the waiting and the running sequences. `select` may admit rows one by one or whole batches."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a request."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""

    @abstractmethod
    def select(self) -> Batch:
        """The rows of the next step; empty only when nothing is left to do."""

    @abstractmethod
    def retire(self, finished: Iterable[Sequence]) -> None:
        """Take finished or abandoned sequences out."""

    def budget(self, batch: Batch, num_speculative_tokens: int, max_model_len: int) -> list[int]:
        """``[B]`` the most tokens to draft per row.

        That is one below what the row may still generate, since every step gives one token of the target's own.
        """
        return [
            max(0, min(num_speculative_tokens, row.num_remaining - 1, max_model_len - len(row.tokens) - 1))
            for row in batch
        ]


class StaticScheduler(Scheduler):
    """Fills a batch from the queue and refills it when all of its rows are done, as in the paper's experiments.

    Args:
        batch_size: rows of a batch, at least one.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._waiting: deque[Request] = deque()
        self._running: list[Sequence] = []

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def select(self) -> Batch:
        if not self._running:
            count = min(self.batch_size, len(self._waiting))
            self._running = [Sequence(self._waiting.popleft()) for _ in range(count)]
        return Batch(tuple(self._running))

    def retire(self, finished: Iterable[Sequence]) -> None:
        gone = {sequence.request_id for sequence in finished}
        self._running = [sequence for sequence in self._running if sequence.request_id not in gone]
