"""Packing concatenates what is not cached and what is drafted, with true positions, and can be unpacked again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import PackedInputs
from emssd.decoding.packing import pack, pack_nodes
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
def test_each_row_is_its_uncached_tokens_and_its_draft_at_true_positions(case: tuple[list[Row], Draft]) -> None:
    rows, draft = case
    packed = pack(rows, draft)
    ids, positions = unpack(packed, packed.input_ids), unpack(packed, packed.position_ids)
    assert packed.request_ids == tuple(row.request_id for row in rows)
    assert packed.num_rows == len(rows) == len(ids)
    assert packed.num_tokens == len(packed.input_ids) == len(packed.position_ids) == sum(map(len, ids))
    for i, row in enumerate(rows):
        whole = list(row.tokens) + draft.token_ids[draft.indptr[i] : draft.indptr[i + 1]].tolist()
        assert ids[i] == whole[row.num_cached :]
        assert positions[i] == list(range(row.num_cached, len(whole)))
        assert packed.kv_lens[i] == len(whole)


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


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90)), min_size=1, max_size=6))
def test_pack_nodes_is_packing_rows_that_lack_their_newest_token_only(pairs: list[tuple[int, int]]) -> None:
    tokens, positions = [list(column) for column in zip(*pairs, strict=True)]
    names = [f"r{i}" for i in range(len(pairs))]
    rows = [
        Row(Request(name, (0,) * position + (token,), 5), num_cached=position)
        for name, token, position in zip(names, tokens, positions, strict=True)
    ]
    one, many = (
        pack_nodes(names, torch.tensor(tokens), [1] * len(names), [p + 1 for p in positions]),
        pack(rows, Draft.empty(len(rows))),
    )
    assert (one.request_ids, one.qo_indptr, one.kv_lens) == (many.request_ids, many.qo_indptr, many.kv_lens)
    for ours, theirs in [
        (one.input_ids, many.input_ids),
        (one.position_ids, many.position_ids),
        (one.logit_rows, many.logit_rows),
    ]:
        assert ours.tolist() == theirs.tolist()
