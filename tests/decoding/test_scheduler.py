"""Schedulers choose rows: static batches, continuous ones in pieces and with preemption, and limits of drafts.

`ContinuousScheduler` is run through random histories without any model, and each schedule is held to what the class
and `Schedule` say of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from emssd.decoding.scheduler import ContinuousScheduler, Fits, Schedule, Scheduler, StaticScheduler
from emssd.sequences import Request, Row
from tests.support.tiers import looped


def no_limit(kv_lens: Mapping[str, int]) -> bool:
    return True


def at_most(num_pages: int, page_size: int = 1) -> Fits:
    return lambda kv_lens: sum(-(-length // page_size) for length in kv_lens.values()) <= num_pages


def row(name: str, num_prompt: int = 1, num_new: int = 10) -> Row:
    return Row(Request(name, (1,) * num_prompt, num_new))


def names(schedule: Schedule) -> list[str]:
    return list(schedule.batch.request_ids)


def pieces(schedule: Schedule) -> dict[str, int]:
    return {piece.row.request_id: piece.num_tokens for piece in schedule.prefills}


def advance(schedule: Schedule, accepted: list[int] | None = None) -> list[Row]:
    """Apply a schedule as the engine does; rows accept so many drafted tokens. Returns finished rows."""
    for sequence in schedule.preempted:
        sequence.num_cached = 0
    for piece in schedule.prefills:
        piece.row.num_cached = piece.row.num_cached + piece.num_tokens
    for index, sequence in enumerate(schedule.batch):
        count = accepted[index] if accepted else 0
        sequence.advance(*sequence.taken([5] * (count + 1)), num_drafted=count, num_accepted=count)
    return [sequence for sequence in schedule.batch if sequence.finish_reason is not None]


@given(st.integers(1, 5), st.integers(0, 12), st.data())
def test_static_batches_fill_in_order_shrink_as_rows_finish_and_refill_when_empty(
    batch_size: int, count: int, data: st.DataObject
) -> None:
    scheduler = StaticScheduler(batch_size)
    waiting = [str(i) for i in range(count)]
    for name in waiting:
        scheduler.add(row(name))
    expected: list[str] = []
    while waiting or expected:
        if not expected:
            expected, waiting = waiting[:batch_size], waiting[batch_size:]
        assert scheduler.has_work
        schedule = scheduler.select(no_limit, 4)
        assert names(schedule) == expected
        assert not schedule.prefills
        assert not schedule.preempted
        assert names(scheduler.select(no_limit, 4)) == expected, "to select twice selects the same rows"
        assert scheduler.num_waiting == len(waiting)
        finished = data.draw(st.lists(st.sampled_from(expected), min_size=1, unique=True))
        scheduler.retire([sequence for sequence in schedule.batch if sequence.request_id in finished])
        expected = [name for name in expected if name not in finished]
    assert not scheduler.has_work
    assert len(scheduler.select(no_limit, 4).batch) == 0


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(30, 60))
def test_static_batches_hold_only_rows_that_fit_to_their_ends(lengths: list[int], limit: int) -> None:
    scheduler = StaticScheduler(4)
    rows = [row(str(i), 1, length - 1 or 1) for i, length in enumerate(lengths)]
    for sequence in rows:
        scheduler.add(sequence)
    left = list(rows)
    while scheduler.has_work:
        batch = list(scheduler.select(at_most(limit), 4).batch)
        assert batch == left[: len(batch)]
        assert sum(sequence.max_length for sequence in batch) <= limit
        if len(batch) < min(4, len(left)):
            assert sum(sequence.max_length for sequence in left[: len(batch) + 1]) > limit, "one more would have fit"
        scheduler.retire(batch)
        left = left[len(batch) :]
    assert not left


@looped("make", [StaticScheduler, ContinuousScheduler])
@looped(
    ("num_speculative_tokens", "num_generated", "max_length", "limit"),
    [(4, 0, 103, 4), (0, 0, 103, 0), (4, 0, 4, 0), (4, 0, 5, 1), (4, 7, 13, 2), (4, 9, 13, 0), (4, 0, 6, 2)],
)
def test_limits_leave_room_for_the_targets_own_token(
    make: type[Scheduler], num_speculative_tokens: int, num_generated: int, max_length: int, limit: int
) -> None:
    sequence = Row(Request("a", (1, 2, 3), 100), max_length=max_length)
    sequence.extend([5] * num_generated)
    scheduler = make(1)
    scheduler.add(sequence)
    assert scheduler.select(no_limit, num_speculative_tokens).limits == (limit,)


def test_rows_draft_less_where_the_cache_is_nearly_full() -> None:
    scheduler = ContinuousScheduler(2, headroom=0)
    for name in "ab":
        scheduler.add(row(name, 4, 20))
    assert scheduler.select(at_most(13), 8).limits == (2, 2)


@dataclass
class Options:
    """Options of one scheduling history."""

    batch_size: int
    max_step_tokens: int
    num_speculative_tokens: int
    headroom: int | None
    page_size: int
    num_tokens: int
    fits: Fits = field(init=False)

    def __post_init__(self) -> None:
        self.fits = at_most(-(-self.num_tokens // self.page_size), self.page_size)

    def make(self) -> ContinuousScheduler:
        worst_case, headroom = self.headroom is None, self.headroom or 0
        return ContinuousScheduler(self.batch_size, self.max_step_tokens, worst_case=worst_case, headroom=headroom)


OPTIONS = st.builds(
    Options,
    batch_size=st.integers(1, 6),
    max_step_tokens=st.integers(1, 12) | st.integers(1, 100),
    num_speculative_tokens=st.integers(0, 7),
    headroom=st.none() | st.integers(0, 20),
    page_size=st.sampled_from([1, 3, 16]),
    num_tokens=st.integers(60, 160),
)


@settings(max_examples=settings.default.max_examples * 5)
@given(options=OPTIONS, data=st.data())
def test_every_schedule_of_any_history_is_as_documented(options: Options, data: st.DataObject) -> None:
    scheduler = options.make()
    unfinished: list[Row] = []  # in order of arrival
    arrivals = [
        (step, row(str(i), num_prompt, num_new))
        for i, (step, num_prompt, num_new) in enumerate(
            sorted(
                data.draw(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 40), st.integers(1, 20)), max_size=9))
            )
        )
    ]
    bound = sum(sequence.max_length for _, sequence in arrivals) + 16
    ran: list[Row] = []
    for step in range(bound):
        for due, sequence in arrivals:
            if due == step:
                scheduler.add(sequence)
                unfinished.append(sequence)
        assert scheduler.has_work == bool(unfinished)
        if not unfinished:
            continue
        uncached = {sequence.request_id: sequence.num_uncached for sequence in unfinished}
        schedule = scheduler.select(options.fits, options.num_speculative_tokens)
        running = unfinished[: len(unfinished) - scheduler.num_waiting]
        check_rows(schedule, options, unfinished, running, ran)
        check_limits(schedule, options, running)
        check_tokens(schedule, options, running, uncached)
        accepted = [data.draw(st.integers(0, limit), label="accepted") for limit in schedule.limits]
        before = len(running[0].tokens), running[0].num_cached
        finished = advance(schedule, accepted)
        assert (len(running[0].tokens), running[0].num_cached) > before, "the earliest row stands still"
        scheduler.retire(finished)
        unfinished = [sequence for sequence in unfinished if sequence not in finished]
        ran = [sequence for sequence in running if sequence not in finished]
    assert not unfinished, "a row never ends"


def check_rows(schedule: Schedule, options: Options, unfinished: list[Row], running: list[Row], ran: list[Row]) -> None:
    """Assert that the earliest rows run, and that the latest leave only if they must."""
    assert 1 <= len(running) <= options.batch_size
    lost = {sequence.request_id for sequence in schedule.preempted}
    assert lost == {sequence.request_id for sequence in ran[len(ran) - len(lost) :]}
    assert options.fits({sequence.request_id: len(sequence.tokens) for sequence in running}) or len(running) == 1
    if schedule.preempted:
        assert options.headroom is not None, "a row was preempted in spite of worst_case"
        assert running == ran[: len(running)], "a row was admitted in the step that preempts another"
        kept = ran[: len(running) + 1]
        assert not options.fits({sequence.request_id: len(sequence.tokens) for sequence in kept}), "it had room"
        return
    assert running[: len(ran)] == ran
    for count in range(len(ran) + 1, len(running) + 1):
        assert count == 1 or options.fits(to_come(options, unfinished[:count])), "admitted without room"
    if len(running) < min(options.batch_size, len(unfinished)):
        assert not options.fits(to_come(options, unfinished[: len(running) + 1])), "there was room for one more"


def to_come(options: Options, rows: list[Row]) -> dict[str, int]:
    grown = 1000 if options.headroom is None else options.headroom
    return {sequence.request_id: min(sequence.max_length, len(sequence.tokens) + grown) for sequence in rows}


def check_limits(schedule: Schedule, options: Options, running: list[Row]) -> None:
    wanted = [min(options.num_speculative_tokens, sequence.num_remaining - 1) for sequence in schedule.batch]
    assert len(schedule.limits) == len(wanted)
    assert all(0 <= limit <= want for limit, want in zip(schedule.limits, wanted, strict=True))

    def needed(limits: Any) -> dict[str, int]:
        lengths = {sequence.request_id: len(sequence.tokens) for sequence in running}
        drafted = zip(schedule.batch, limits, strict=True)
        return lengths | {sequence.request_id: len(sequence.tokens) + limit for sequence, limit in drafted}

    assert options.fits(needed(schedule.limits)) or len(running) == 1, "drafts would push a row out"
    if options.fits(needed(wanted)):
        assert list(schedule.limits) == wanted, "there was room to draft more"


def check_tokens(schedule: Schedule, options: Options, running: list[Row], uncached: dict[str, int]) -> None:
    """All decoding rows run; prompts share what they leave, half of it for the first, then the shortest."""
    computed = {name: uncached[name] for name in names(schedule)} | pieces(schedule)
    assert all(1 <= count < uncached[name] for name, count in pieces(schedule).items())
    decoding = [sequence.request_id for sequence in running if uncached[sequence.request_id] == 1]
    assert set(decoding) <= set(names(schedule))
    prompts = [sequence.request_id for sequence in running if uncached[sequence.request_id] > 1]
    assert set(computed) <= {*decoding, *prompts}
    left = options.max_step_tokens - len(decoding) * (1 + options.num_speculative_tokens)
    budget = max(left, options.max_step_tokens // 4, 1)
    shares = {name: computed.get(name, 0) for name in prompts}
    assert sum(shares.values()) == min(budget, sum(uncached[name] for name in prompts))
    if prompts:
        first, others = prompts[0], sorted(prompts[1:], key=lambda name: uncached[name])
        assert shares[first] >= min(uncached[first], -(-budget // 2)), "half is kept for the first"
        for shorter, longer in pairwise(others):
            if uncached[shorter] < uncached[longer] and shares[longer]:
                assert shares[shorter] == uncached[shorter], "a prompt waits for a longer one"


def test_preempted_rows_come_back_first_and_in_order() -> None:
    scheduler = ContinuousScheduler(4, headroom=0)
    rows = [row(name, 4, 6) for name in "abcde"]
    for sequence in rows:
        scheduler.add(sequence)
    limit = 16
    advance(scheduler.select(at_most(limit), 0))
    schedule = scheduler.select(at_most(limit), 0)  # four rows of 5 tokens where there is room for 16
    assert [sequence.request_id for sequence in schedule.preempted] == ["d"]
    assert names(schedule) == ["a", "b", "c"]
    assert scheduler.num_waiting == 2
    advance(schedule)
    schedule = scheduler.select(at_most(10), 0)
    assert {sequence.request_id for sequence in schedule.preempted} == {"b", "c"}
    advance(schedule)
    schedule = scheduler.select(no_limit, 0)
    assert names(schedule) == ["a", "b", "c", "d"]
    assert [len(sequence.tokens) for sequence in schedule.batch] == [7, 6, 6, 5], "it begins anew with what it has"
    scheduler.retire(rows[1:2])
    assert names(scheduler.select(no_limit, 0)) == ["a", "c", "d", "e"]


def test_clear_gives_back_everything_that_was_there() -> None:
    scheduler = ContinuousScheduler(2)
    rows = [row(name, 3) for name in "abc"]
    for sequence in rows:
        scheduler.add(sequence)
    scheduler.select(no_limit, 2)
    assert scheduler.clear() == rows
    assert not scheduler.has_work
