"""A sequence grows by what it is given, up to its first EOS and its limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emssd.sequences import FinishReason, Request, Row
from tests.support.tiers import looped


def sequence(max_new_tokens: int = 5, eos: frozenset[int] = frozenset({2})) -> Row:
    return Row(Request("a", (7, 2, 8), max_new_tokens, eos))


@looped(
    ("new", "output", "reason"),
    [
        ([4, 5], [4, 5], None),
        ([4, 2], [4, 2], FinishReason.EOS),
        ([2], [2], FinishReason.EOS),
        ([4, 2, 5, 2], [4, 2], FinishReason.EOS),
        ([4, 4, 4, 4, 4], [4, 4, 4, 4, 4], FinishReason.LENGTH),
        ([4, 4, 4, 4, 4, 4, 2], [4, 4, 4, 4, 4], FinishReason.LENGTH),
        ([4, 4, 4, 4, 2], [4, 4, 4, 4, 2], FinishReason.EOS),  # both at once: EOS is the reason
        ([4, 4, 4, 4, 4, 2], [4, 4, 4, 4, 4], FinishReason.LENGTH),
    ],
)
def test_is_cut_after_the_first_eos_and_at_the_limit(
    new: list[int], output: list[int], reason: FinishReason | None
) -> None:
    row = sequence()
    row.extend(new)
    assert row.output_ids == output
    assert row.tokens == [7, 2, 8, *output]
    assert row.finish_reason is reason
    assert row.num_remaining == 5 - len(output)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(1, 12))
def test_growing_in_pieces_equals_growing_at_once(pieces: list[list[int]], limit: int) -> None:
    piecewise, whole = sequence(limit), sequence(limit)
    for piece in pieces:
        if piecewise.finish_reason is None:
            piecewise.extend(piece)
    whole.extend([token for piece in pieces for token in piece])
    assert (piecewise.output_ids, piecewise.finish_reason) == (whole.output_ids, whole.finish_reason)
    assert len(whole.output_ids) <= limit
    assert 2 not in whole.output_ids[:-1]
