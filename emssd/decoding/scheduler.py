"""The rows of the next step: whole batches (`StaticScheduler`) or rows that come and go (`ContinuousScheduler`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import islice, repeat
from typing import NamedTuple

from emssd.decoding.prefixes import Prefixes
from emssd.sequences import Batch, Row

__all__ = ["ContinuousScheduler", "Fits", "Prefill", "Schedule", "Scheduler", "StaticScheduler"]

Fits = Callable[[Mapping[str, int]], bool]
"""`AttentionBackend.fits`: whether the KV cache can hold these rows at these lengths, and no others."""


class Prefill(NamedTuple):
    """A piece of a long prompt: the next `num_tokens` of a row, after which more of its prompt is to come."""

    row: Row
    num_tokens: int


class Schedule(NamedTuple):
    """The work of the next step.

    Attributes:
        batch: rows whose tokens are all computed by this step, so that they can be drafted for and verified.
        limits: ``[B]`` how many tokens may be drafted for each row of `batch`. A chain has at most one token less than
            the row may still generate, as the target adds one.
        prefills: rows that compute a piece of their prompt, and nothing is verified.
        preempted: rows that lose their KV to others and wait to be computed again.
        num_adopted_tokens: tokens of rows whose KV was there already, so that they need not be computed.
    """

    batch: Batch
    limits: tuple[int, ...]
    prefills: tuple[Prefill, ...] = ()
    preempted: tuple[Row, ...] = ()
    num_adopted_tokens: int = 0

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of all pieces together."""
        return sum([piece.num_tokens for piece in self.prefills]) if self.prefills else 0


class Scheduler(ABC):
    """Holds the waiting and the running rows.

    Attributes:
        prefixes: what rows share; an engine sets it.
        trees: whether a row may draft more tokens than it may still generate, as they need not follow each other; an
            engine sets it.
    """

    prefixes: Prefixes = Prefixes()
    trees: bool = False

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []

    @abstractmethod
    def select(self, fits: Fits, num_speculative_tokens: int) -> Schedule:
        """The next step; it has rows as long as there is work. Every row `fits` if it is alone."""

    def add(self, row: Row) -> None:
        """Queue a row."""
        self._waiting.append(row)

    @property
    def has_work(self) -> bool:
        """Whether any row waits or runs."""
        return bool(self._running or self._waiting)

    def knows(self, request_id: str) -> bool:
        """Whether a row of this id waits or runs."""
        return any(row.request_id == request_id for rows in (self._running, self._waiting) for row in rows)

    @property
    def num_waiting(self) -> int:
        """Rows that do not run."""
        return len(self._waiting)

    def retire(self, finished: Seq[Row]) -> None:
        """Take finished rows out."""
        if finished:
            self._running = [row for row in self._running if row not in finished]

    def clear(self, request_ids: Collection[str] | None = None) -> list[Row]:
        """Take these requests out, or everything. Returns what was there, running or not."""
        rows = [*self._running, *self._waiting]
        gone = [row for row in rows if request_ids is None or row.request_id in request_ids]
        names = {row.request_id for row in gone}
        self._running = [row for row in self._running if row.request_id not in names]
        self._waiting = deque(row for row in self._waiting if row.request_id not in names)
        return gone

    def _admit(self, running: list[Row], length: Callable[[Row], int], fits: Fits) -> list[Row]:
        """Take in waiting rows, in order of arrival, each with the KV of its known beginning.

        They fit beside the `running` rows, each at its `length`.
        """
        if not self._waiting or len(running) >= self.batch_size:
            return []
        lengths, admitted = {row.request_id: length(row) for row in running}, list[Row]()
        for candidate in islice(self._waiting, self.batch_size - len(running)):
            lengths[candidate.request_id] = length(candidate)
            self.prefixes.adopt(candidate)
            if (running or admitted) and not fits(lengths):
                self.prefixes.give_back([candidate])
                break
            admitted.append(candidate)
        return admitted

    def _recover(self) -> None:
        """Waiting rows hold no KV, not even after a call of `select` that failed."""
        if self._waiting:
            self.prefixes.give_back(islice(self._waiting, self.batch_size))


class StaticScheduler(Scheduler):
    """Fills a batch from the queue and refills it when all of its rows are done, as in the paper's experiments.

    Fewer rows than `batch_size` run if the KV cache may not hold them to their ends.
    """

    def select(self, fits: Fits, num_speculative_tokens: int) -> Schedule:
        self._recover()
        num_adopted = 0
        if not self._running:
            admitted = self._admit([], lambda row: row.max_length, fits)
            num_adopted = sum(row.num_cached for row in admitted)
            for _ in admitted:  # nothing but KV has changed up to here, where `fits` may fail
                self._waiting.popleft()
            self._running = admitted
        rows = self._running
        if self.trees:  # these may outgrow what a row will hold in the end
            limits = _fitting_limits(rows, _lengths(rows), num_speculative_tokens, self.trees, fits)
        else:
            limits = _draft_limits(rows, num_speculative_tokens)
        return Schedule(Batch(tuple(rows)), limits, num_adopted_tokens=num_adopted)


class ContinuousScheduler(Scheduler):
    """Replaces a row in the step after it ends, and mixes pieces of long prompts with decoding rows.

    Rows are admitted in order of arrival. Where the KV cache runs out, the latest row gives its KV up and is computed
    again later; the earliest never is, so that there is always progress.

    Args:
        max_step_tokens: the most tokens that a step computes, as far as prompts are concerned: decoding rows, at
            ``1 + num_speculative_tokens`` each, come first, and prompts share what is left, but at least a quarter.
        worst_case: admit a row only if all rows could grow to their full length, so that none is ever preempted.
        headroom: else admit a row if it and all running rows could grow by so many tokens.
    """

    def __init__(
        self, batch_size: int, max_step_tokens: int = 512, *, worst_case: bool = False, headroom: int = 64
    ) -> None:
        super().__init__(batch_size)
        self._max_step_tokens = max_step_tokens
        self._worst_case = worst_case
        self._headroom = headroom

    def select(self, fits: Fits, num_speculative_tokens: int) -> Schedule:
        self._recover()
        if (steady := self._steady(fits, num_speculative_tokens)) is not None:
            return steady
        running, lengths, preempted = self._preempt(fits)
        admitted = [] if preempted else self._admit(running, self._length_to_come, fits)
        running = [*running, *admitted]
        prompts = [row for row in running if row.num_uncached > 1]
        num_adopted = sum(row.num_cached for row in admitted) + sum(map(self.prefixes.adopt, prompts))
        waits = self.prefixes.waits(prompts)
        rows = [row for row in running if row.request_id not in waits]
        needs = [row.num_uncached for row in rows]
        budget = self._max_step_tokens - needs.count(1) * (1 + num_speculative_tokens)
        shares = _shares([need for need in needs if need > 1], max(budget, self._max_step_tokens // 4, 1))
        complete, pieces = [], []
        for row, need in zip(rows, needs, strict=True):
            share = shares.pop(0) if need > 1 else 1
            if share == need:
                complete.append(row)
            elif share:
                pieces.append(Prefill(row, share))
        lengths |= _lengths(admitted)
        limits = _fitting_limits(complete, lengths, num_speculative_tokens, self.trees, fits)
        for _ in admitted:  # nothing but KV has changed up to here, where `fits` may fail
            self._waiting.popleft()
        self._waiting.extendleft(preempted)
        self._running = running
        return Schedule(Batch(tuple(complete)), limits, tuple(pieces), preempted, num_adopted)

    def _steady(self, fits: Fits, num_speculative_tokens: int) -> Schedule | None:
        """The next step if no row can come in, and all that run decode and fit with their drafts. Most steps are so."""
        rows = self._running
        has_room = self._waiting and len(rows) < self.batch_size
        if has_room or max([len(row.tokens) - row.num_cached for row in rows], default=0) > 1:
            return None
        limits = _draft_limits(rows, num_speculative_tokens, self.trees)
        return Schedule(Batch(tuple(rows)), limits) if fits(_lengths(rows, limits)) else None

    def _preempt(self, fits: Fits) -> tuple[list[Row], dict[str, int], tuple[Row, ...]]:
        """The running rows that fit, each with all of its tokens, their lengths, and the latest, which are to go."""
        kept, lengths, preempted = list(self._running), _lengths(self._running), list[Row]()
        while len(kept) > 1 and not fits(lengths):
            preempted.append(kept.pop())
            del lengths[preempted[-1].request_id]
        return kept, lengths, tuple(preempted)

    def _length_to_come(self, row: Row) -> int:
        return row.max_length if self._worst_case else min(row.max_length, len(row.tokens) + self._headroom)


def _fitting_limits(
    rows: list[Row], lengths: dict[str, int], num_speculative_tokens: int, trees: bool, fits: Fits
) -> tuple[int, ...]:
    """``[B]`` for `rows`, a part of the rows of `lengths`. Where the cache is nearly full they draft less."""
    while True:
        limits = _draft_limits(rows, num_speculative_tokens, trees)
        if not any(limits) or fits(lengths | _lengths(rows, limits)):
            return limits
        num_speculative_tokens //= 2


def _lengths(rows: Seq[Row], drafted: Iterable[int] = repeat(0)) -> dict[str, int]:
    """The tokens of each row by request id, with so many drafted ones."""
    return {row.request_id: len(row.tokens) + number for row, number in zip(rows, drafted, strict=False)}


def _draft_limits(rows: list[Row], most: int, trees: bool = False) -> tuple[int, ...]:
    """A chain ends one below what a row may still generate, since every step gives one token of the target's own."""
    left = [row.max_length - len(row.tokens) - 1 for row in rows]
    return tuple([most if number >= most or (trees and number > 0) else max(0, number) for number in left])


def _shares(needs: list[int], budget: int) -> list[int]:
    """Share `budget` tokens among prompts, which need `needs`, in order of arrival.

    Half, rounded up, is kept for the first, so that it ends; the other prompts go by length, so that none waits for a
    longer one; what they leave goes to the first again.
    """
    if not needs:
        return []
    shares = [0] * len(needs)
    left = budget - min(needs[0], max((budget + 1) // 2, budget - sum(needs[1:])))
    shares[0] = budget - left
    for i in sorted(range(1, len(needs)), key=needs.__getitem__):
        shares[i] = min(needs[i], left)
        left -= shares[i]
    return shares
