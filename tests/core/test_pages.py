"""Pages belong to one sequence at a time, are as few as possible, and stay where they are."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from emssd.attention.pages import PageTable

NAMES = st.sampled_from(["a", "b", "c"])
TOKENS = st.integers(0, 40)


class PageTableMachine(RuleBasedStateMachine):
    """The model is a dictionary: how many tokens each sequence has room for."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 16]))
    def make(self, page_size: int) -> None:
        self.size = page_size
        self.table = PageTable(page_size)
        self.num_pages: dict[str, int] = {}
        self.peak = 0

    @rule(name=NAMES, num_tokens=TOKENS)
    def reserve(self, name: str, num_tokens: int) -> None:
        before = list(self.table.pages(name))
        self.table.reserve(name, num_tokens)
        self.num_pages[name] = max(len(before), -(-num_tokens // self.size))
        assert self.table.pages(name)[: len(before)] == before

    @rule(name=NAMES, data=st.data())
    def truncate(self, name: str, data: st.DataObject) -> None:
        before = list(self.table.pages(name))
        num_tokens = data.draw(st.integers(0, len(before) * self.size + 2))
        self.table.truncate(name, num_tokens)
        left = min(len(before), -(-num_tokens // self.size))
        self.num_pages[name] = left
        assert self.table.pages(name) == before[:left]

    @rule(names=st.lists(NAMES, max_size=3))
    def release(self, names: list[str]) -> None:
        self.table.release([*names, "unknown"])
        for name in names:
            self.num_pages.pop(name, None)

    @rule(name=NAMES, data=st.data())
    def slots(self, name: str, data: st.DataObject) -> None:
        capacity = self.num_pages.get(name, 0) * self.size
        if capacity == 0:
            return
        start = data.draw(st.integers(0, capacity))
        stop = data.draw(st.integers(start, capacity))
        pages = self.table.pages(name)
        flat = [page * self.size + offset for page in pages for offset in range(self.size)]
        assert self.table.slots(name, range(start, stop)) == flat[start:stop]

    @invariant()
    def every_page_has_one_owner_and_none_is_wasted(self) -> None:
        owned = [page for name in "abc" for page in self.table.pages(name)]
        assert len(owned) == len(set(owned))
        assert {name: len(self.table.pages(name)) for name in self.num_pages} == self.num_pages
        assert self.table.num_used == len(owned) == sum(self.num_pages.values())
        self.peak = max(self.peak, len(owned))
        assert self.table.num_pages == self.peak, "the pool grows only when no page is free"
        assert all(0 <= page < self.table.num_pages for page in owned)


TestPageTable = PageTableMachine.TestCase
TestPageTable.settings = settings(
    settings.default, max_examples=settings.default.max_examples * 4, stateful_step_count=25
)
