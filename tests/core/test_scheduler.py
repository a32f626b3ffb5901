"""Static batches in order of arrival, and budgets that leave room for the target's own token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emssd.scheduler import StaticScheduler
from emssd.sequence import Batch, Request, Sequence


@given(st.integers(1, 5), st.integers(0, 12), st.data())
def test_batches_fill_in_order_shrink_as_rows_finish_and_refill_when_empty(
    batch_size: int, count: int, data: st.DataObject
) -> None:
    scheduler = StaticScheduler(batch_size)
    names = [str(i) for i in range(count)]
    for name in names:
        scheduler.add(Request(name, (1,), 1))
    expected: list[str] = []
    while names or expected:
        if not expected:
            expected, names = names[:batch_size], names[batch_size:]
        assert scheduler.has_work
        batch = scheduler.select()
        assert list(batch.request_ids) == expected
        assert scheduler.select().sequences == batch.sequences, "to select twice selects the same rows"
        finished = data.draw(st.lists(st.sampled_from(expected), min_size=1, unique=True))
        scheduler.retire([row for row in batch if row.request_id in finished])
        expected = [name for name in expected if name not in finished]
    assert not scheduler.has_work
    assert len(scheduler.select()) == 0


@pytest.mark.parametrize(
    ("num_speculative_tokens", "num_generated", "max_new_tokens", "max_model_len", "budget"),
    [
        (4, 0, 100, 100, 4),
        (0, 0, 100, 100, 0),
        (4, 0, 1, 100, 0),
        (4, 0, 2, 100, 1),
        (4, 7, 10, 100, 2),
        (4, 9, 10, 100, 0),
        (4, 0, 100, 6, 2),
        (4, 0, 100, 4, 0),
        (4, 0, 100, 3, 0),
    ],
)
def test_budget_leaves_room_for_the_targets_own_token(
    num_speculative_tokens: int, num_generated: int, max_new_tokens: int, max_model_len: int, budget: int
) -> None:
    row = Sequence(Request("a", (1, 2, 3), max_new_tokens))
    row.extend([5] * num_generated)
    assert StaticScheduler(1).budget(Batch((row,)), num_speculative_tokens, max_model_len) == [budget]


def test_budget_is_each_rows_own() -> None:
    rows = tuple(Sequence(Request(str(limit), (1,), limit)) for limit in (1, 3, 9))
    assert StaticScheduler(3).budget(Batch(rows), 5, 100) == [0, 2, 5]
