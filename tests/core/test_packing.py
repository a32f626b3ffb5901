"""Packing concatenates what is not cached and what is drafted, with true positions, and can be unpacked again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import PackedInputs
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.sequences import Request, Row
from tests.support.strategies import drafts, prompt_batches


@st.composite
def rows_and_drafts(draw: st.DrawFn) -> tuple[list[Row], Draft]:
    rows = [Row(Request(f"r{i}", tuple(ids), 9)) for i, ids in enumerate(draw(prompt_batches(50, 5)))]
    for row in rows:
        row.num_cached = draw(st.integers(0, len(row.tokens) - 1))
    return rows, draw(drafts([draw(st.integers(0, 6)) for _ in rows], 50))


def unpack(packed: PackedInputs, values: torch.Tensor) -> list[list[int]]:
    return [values[a:b].tolist() for a, b in zip(packed.qo_indptr, packed.qo_indptr[1:], strict=False)]


@given(rows_and_drafts())
def test_logits_are_wanted_of_each_newest_token_and_each_drafted_one(case: tuple[list[Row], Draft]) -> None:
    rows, draft = case
    packed = pack(rows, draft)
    wanted = [
        (i, position)
        for i, (row, drafted) in enumerate(zip(rows, draft.lengths, strict=True))
        for position in range(len(row.tokens) - 1, len(row.tokens) + drafted)
    ]
    owner = [i for i, row in enumerate(unpack(packed, packed.input_ids)) for _ in row]
    found = [(owner[token], int(packed.position_ids[token])) for token in packed.logit_rows.tolist()]
    assert found == wanted
    assert len(found) == len(rows) + draft.token_ids.numel()


@given(rows_and_drafts())
def test_packing_changes_nothing_it_is_given(case: tuple[list[Row], Draft]) -> None:
    rows, draft = case
    before = [(list(row.tokens), row.num_cached) for row in rows], draft.token_ids.clone()
    pack(rows, draft)
    assert [(row.tokens, row.num_cached) for row in rows] == before[0]
    assert torch.equal(draft.token_ids, before[1])
