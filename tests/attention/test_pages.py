"""Pages have one owner, or several readers of one text, are as few as possible, and are never written to while shared.

The model of a page is what it would hold: for each token the text that ends with it, as KV depends on all of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emssd.attention.pages import PageTable
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.errors import OutOfMemoryError

Text = tuple[int, ...]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
MAX_PAGES = 9


@dataclass
class Row:
    """A sequence that a step can be packed of."""

    request_id: str
    tokens: list[int]
    num_cached: int = 0
    was_cut: bool = field(default=False)


class SharedPagesMachine(RuleBasedStateMachine):
    """Rows over two tokens, so that most begin alike; every write is made, and every row read after every rule."""

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def make(self, page_size: int) -> None:
        self.size = page_size
        self.table = PageTable(page_size, max_pages=MAX_PAGES)
        self.memory: dict[int, Text | None] = {}  # by slot
        self.rows: dict[str, Row] = {}
        self.num_rows = 0
        self.failed: Row | None = None

    @rule(tokens=TOKENS)
    def arrive(self, tokens: Text) -> None:
        self.num_rows += 1
        row = Row(f"r{self.num_rows}", list(tokens))
        used, indexed = self.table.num_used, self.known()
        row.num_cached = self.table.adopt(row.request_id, row.tokens)
        prefixes = [end for end in range(0, len(tokens), self.size) if all_known(tokens[:end], indexed, self.size)]
        assert row.num_cached == max(prefixes), "a longer beginning was known"
        assert self.table.num_used <= used + row.num_cached // self.size
        if self.table.fits(self.lengths() | {row.request_id: len(tokens)}):
            self.rows[row.request_id] = row
        else:
            self.table.release([row.request_id])

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), draft=st.lists(st.integers(0, 1), max_size=6), adopts=st.booleans())
    def step(self, data: st.DataObject, draft: list[int], adopts: bool) -> None:
        """Write what is not cached and a draft; keep some of the draft, and publish, if at all, what was kept."""
        row = self.failed or self.pick(data)
        if adopts:
            before = row.num_cached
            row.num_cached = self.table.adopt(row.request_id, row.tokens, before)
            assert before <= row.num_cached < len(row.tokens)
        if not self.table.fits(self.lengths() | {row.request_id: len(row.tokens) + len(draft)}):
            draft = []
            if not self.table.fits(self.lengths()):
                self.depart(row)
                return
        self.table.reserve_step(pack([row], Draft.from_chains([draft])))
        self.copy()
        text = (*row.tokens, *draft)
        slots = self.table.slots(row.request_id, range(row.num_cached, len(text)))
        indexed = {page for page in range(self.table.num_pages) if page in self.table._known}
        for index, slot in enumerate(slots, start=row.num_cached):
            assert slot // self.size not in indexed, "a known page is written to"
            self.memory[slot] = text[: index + 1]
        if data.draw(st.booleans(), label="the step fails"):
            self.failed = row  # it holds more than its tokens take, until its next step
            return
        self.failed = None
        kept = data.draw(st.integers(0, len(draft)), label="kept")
        row.num_cached = len(row.tokens) + kept
        row.tokens = [*row.tokens, *draft[:kept], data.draw(st.integers(0, 1), label="next token")]
        self.table.truncate_all([(row.request_id, row.num_cached)])
        if data.draw(st.booleans(), label="publish"):
            self.publish(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        """A row is cut back, maybe into what it shares; what follows then is another text."""
        row = self.pick(data)
        row.num_cached = data.draw(st.integers(0, row.num_cached), label="kept")
        row.tokens = [*row.tokens[: row.num_cached], data.draw(st.integers(0, 1), label="next token")]
        row.was_cut = True
        self.table.truncate_all([(row.request_id, row.num_cached)])

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), publishes=st.booleans())
    def leave(self, data: st.DataObject, publishes: bool) -> None:
        row = self.pick(data)
        if publishes:
            self.publish(row)
            indexed = self.known()
            assert all_known(tuple(row.tokens[: row.num_cached]), indexed, self.size), "what was published is not known"
        self.depart(row)
        if publishes:
            assert self.known() == indexed, "a released page is forgotten at once"

    @rule()
    def forget(self) -> None:
        self.table.forget()
        assert not self.known()

    @invariant()
    def every_row_reads_its_own_text(self) -> None:
        for row in self.rows.values():
            pages = self.table.pages(row.request_id)
            slots = [page * self.size + offset for page in pages for offset in range(self.size)][: row.num_cached]
            assert [self.memory[slot] for slot in slots] == [tuple(row.tokens[: i + 1]) for i in range(row.num_cached)]

    @invariant()
    def pages_are_counted(self) -> None:
        held = Counter(page for row in self.rows.values() for page in self.table.pages(row.request_id))
        assert self.table.num_used == len(held)
        assert self.table.num_pages <= MAX_PAGES
        assert {page: count for page, count in enumerate(self.table._holders) if count} == dict(held)
        free, idle = list(self.table._free), list(self.table._idle)
        assert sorted([*held, *free, *idle]) == list(range(self.table.num_pages)), "a page is lost or there twice"
        assert not any(page in self.table._known for page in free)
        assert all(page in self.table._known for page in idle)

    @invariant()
    def no_page_is_without_a_token(self) -> None:
        for row in self.rows.values():
            if row is not self.failed:
                assert len(self.table.pages(row.request_id)) == self.count(row.num_cached)

    @invariant()
    def room_is_told_to_the_page(self) -> None:
        if any(row.was_cut for row in self.rows.values()):
            return  # then there is room for a copy, too, and nobody may need it
        rows = self.rows.values()
        held = {page for row in rows for page in self.table.pages(row.request_id)[: self.count(len(row.tokens))]}
        new = sum(max(self.count(len(row.tokens)) - len(self.table.pages(row.request_id)), 0) for row in rows)
        for more in range(MAX_PAGES + 1):
            expected = len(held) + new + more <= MAX_PAGES
            assert self.table.fits(self.lengths() | {"another": more * self.size}) == expected

    def known(self) -> set[Text]:
        """The texts of all whole pages that are found, each with all before it."""
        texts, level = set[Text](), [()]
        while level:
            pages = [(*text, *page) for text in level for page in product((0, 1), repeat=self.size)]
            level = [
                text
                for text in pages
                if len(self.table._known.find(text, len(text) // self.size)) * self.size == len(text)
            ]
            texts.update(level)
        return texts

    def publish(self, row: Row) -> None:
        self.table.publish(row.request_id, row.tokens[: row.num_cached])

    def depart(self, row: Row) -> None:
        self.table.release([row.request_id])
        del self.rows[row.request_id]
        self.failed = None if row is self.failed else self.failed

    def copy(self) -> None:
        for source, target in self.table.copies:
            for offset in range(self.size):
                self.memory[target * self.size + offset] = self.memory.get(source * self.size + offset)
        self.table.copies.clear()

    def lengths(self) -> dict[str, int]:
        return {row.request_id: len(row.tokens) for row in self.rows.values()}

    def pick(self, data: st.DataObject) -> Row:
        return self.rows[data.draw(st.sampled_from(sorted(self.rows)), label="row")]

    def count(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)


def all_known(text: Text, published: set[Text], size: int) -> bool:
    return all(text[:end] in published for end in range(size, len(text) + 1, size))


TestSharedPages = SharedPagesMachine.TestCase
TestSharedPages.settings = settings(
    settings.default, max_examples=settings.default.max_examples * 4, stateful_step_count=30
)


def test_the_end_of_a_text_is_evicted_before_its_head() -> None:
    table = PageTable(1, max_pages=3)
    table.reserve("a", 3)
    table.publish("a", [7, 8, 9])
    table.release(["a"])
    table.reserve("b", 2)
    assert table.adopt("c", [7, 8, 9]) == 1


def test_a_row_that_is_cut_back_into_a_shared_page_gets_a_copy_before_it_writes() -> None:
    table, rows = PageTable(2, max_pages=4), [Row("a", [7, 8, 9, 1, 1], 4), Row("b", [7, 8, 9, 1, 2])]
    table.reserve("a", 4)
    table.publish("a", [7, 8, 9, 1])
    rows[1].num_cached = table.adopt("b", rows[1].tokens)
    rows[1].tokens, rows[1].num_cached = [7, 8, 9, 3], 3
    table.truncate_all([("b", 3)])
    assert table.fits({"a": 4, "b": 4})
    assert not table.fits({"a": 6, "b": 6}), "the copy was not counted"
    table.reserve_step(pack([rows[1]], Draft.empty(1)))
    (shared, private), (head, end) = table.pages("b"), table.pages("a")
    assert shared == head
    assert private != end
    assert table.copies == [(end, private)]


def test_what_a_row_alone_knows_is_unknown_once_it_writes_there() -> None:
    table, row = PageTable(2), Row("a", [7, 8, 9], 1)
    table.reserve("a", 2)
    table.publish("a", [7, 8])
    table.truncate_all([("a", 1)])
    table.reserve_step(pack([row], Draft.empty(1)))
    assert table.copies == []
    assert table.adopt("b", [7, 8, 9]) == 0


def test_a_page_that_two_rows_hold_stays_when_one_of_them_leaves() -> None:
    table = PageTable(1, max_pages=3)
    table.reserve("a", 2)
    table.publish("a", [7, 8])
    assert table.adopt("b", [7, 8, 9]) == 2
    table.release(["a"])
    table.forget()
    table.reserve("c", 1)
    assert not set(table.pages("b")) & set(table.pages("c"))


def test_an_adopted_page_is_not_evicted_and_the_last_token_is_not_adopted() -> None:
    table = PageTable(1, max_pages=3)
    table.reserve("a", 3)
    table.publish("a", [7, 8, 9])
    table.release(["a"])
    assert table.adopt("b", [7, 8, 9]) == 2
    pages = table.pages("b")
    table.reserve("c", 1)
    assert not set(pages) & set(table.pages("c"))
    with pytest.raises(OutOfMemoryError, match="all of its 3 pages"):
        table.reserve("d", 1)
