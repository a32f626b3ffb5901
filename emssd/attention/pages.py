"""The pages of a KV pool by sequence, as integers."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from operator import sub

import numpy as np
from numpy.typing import NDArray

from emssd.attention.packed import PackedInputs
from emssd.errors import OutOfMemoryError

__all__ = ["PageTable"]

_Key = tuple[int, tuple[int, ...]]  # the node before, and the tokens of the page
_NONE: array[int] = array("i")


class PageTable:
    """Page lists of sequences over one pool that grows on demand.

    Sequences that begin alike can share whole pages. A page is *known* when `publish` has noted its tokens, so that
    `adopt` can find it; it is *shared* while several sequences hold it. Known pages that nobody holds stay until their
    memory is needed; the longest unused go first. A sequence that would write into a known or shared page gets a copy.

    Args:
        page_size: tokens per page.
        max_pages: the pool grows no further; ``None`` for no limit.

    Attributes:
        copies: pages to copy before the next forward pass, from and to, in this order. Who copies them clears the list.
    """

    def __init__(self, page_size: int, max_pages: int | None = None) -> None:
        self.page_size = page_size
        self.max_pages = max_pages
        self.copies: list[tuple[int, int]] = []
        self._holders: list[int] = []  # by page, the number of sequences that hold it
        self._free: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, held by nobody, the longest unused first
        self._known = _PrefixIndex(page_size)
        self._pages: dict[str, array[int]] = {}
        self._shared: dict[str, int] = {}  # of each sequence, the leading tokens whose pages are known or shared

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return len(self._holders)

    @property
    def num_used(self) -> int:
        """Pages that belong to sequences."""
        return len(self._holders) - len(self._free) - len(self._idle)

    def fits(self, lengths: Mapping[str, int]) -> bool:
        """Whether the pool could hold sequences of these lengths, by request id, and no others.

        Pages that they share count once, apart from those that a sequence was cut back into.
        """
        if self.max_pages is None:
            return True
        size = self.page_size
        num_pages = sum([-(-length // size) for length in lengths.values()])
        if num_pages <= self.max_pages or not self._shared:
            return num_pages <= self.max_pages
        shared = set[int]()
        for request_id, length in lengths.items():
            pages = self._pages.get(request_id, _NONE)[: min(self._shared.get(request_id, 0), length) // size]
            shared.update(pages)
            num_pages -= len(pages)
        return num_pages + len(shared) <= self.max_pages

    def pages(self, request_id: str) -> list[int]:
        """The pages of a sequence in token order; empty if it is unknown."""
        return self._pages[request_id].tolist() if request_id in self._pages else []

    def indices(self, request_ids: Iterable[str], counts: Iterable[int]) -> NDArray[np.int32]:
        """``[sum(counts)]`` int32: the first `counts` pages of each of these sequences, one after the other."""
        parts = [self._pages[request_id][:count] for request_id, count in zip(request_ids, counts, strict=True)]
        return np.frombuffer(bytearray().join(parts), dtype=np.int32)

    def reserve(self, request_id: str, num_tokens: int) -> None:
        """Give a sequence the pages that `num_tokens` tokens need. The pages that it has stay in place.

        Raises:
            OutOfMemoryError: the pool is full. A caller that asks `fits` first never sees this.
        """
        if (pages := self._pages.get(request_id)) is None:
            pages = self._pages[request_id] = array("i")
        for _ in range(-(-num_tokens // self.page_size) - len(pages)):
            pages.append(self._take())

    def reserve_step(self, packed: PackedInputs) -> None:
        """Give the rows of a step their pages. First take back what a step took that was planned and not committed."""
        before = list(map(sub, packed.kv_lens, packed.lengths))
        self.truncate_all(zip(packed.request_ids, before, strict=True))
        size, held, shared = self.page_size, self._pages, self._shared
        for request_id, num_cached, kv_len in zip(packed.request_ids, before, packed.kv_lens, strict=True):
            # A call for each row would take longer than all the rest.
            if shared and -(-shared.get(request_id, 0) // size) * size > num_cached:
                self.make_own(request_id, num_cached)
            if request_id not in held or len(held[request_id]) * size < kv_len:
                self.reserve(request_id, kv_len)

    def truncate_all(self, rows: Iterable[tuple[str, int]]) -> None:
        """`truncate` sequences, each to its number of tokens."""
        size, held, shared = self.page_size, self._pages, self._shared  # as above
        for request_id, num_tokens in rows:
            if request_id in held and (
                (len(held[request_id]) - 1) * size >= num_tokens or shared.get(request_id, 0) > num_tokens
            ):
                self.truncate(request_id, num_tokens)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Take back the pages after the first `num_tokens` tokens."""
        pages = self._pages.get(request_id)
        while pages and (len(pages) - 1) * self.page_size >= num_tokens:  # its last page holds none of them
            self._drop(pages.pop())
        if self._shared.get(request_id, 0) > num_tokens:
            self._shared[request_id] = num_tokens

    def release(self, request_ids: Iterable[str]) -> None:
        """Take back all pages of these sequences. Unknown ids are no error."""
        for request_id in request_ids:
            self._shared.pop(request_id, None)
            for page in reversed(self._pages.pop(request_id, _NONE)):  # the end of a text is given up before its head
                self._drop(page)

    def slots(self, request_id: str, tokens: Iterable[int]) -> list[int]:
        """Pool slots (``page * page_size + offset``) of these tokens of a sequence."""
        pages, size = self._pages[request_id], self.page_size
        return [pages[token // size] * size + token % size for token in tokens]

    def adopt(self, request_id: str, tokens: Seq[int], num_cached: int = 0) -> int:
        """Give a sequence the known pages of its longest known beginning, if that is longer than `num_cached`.

        The pages that it had are taken back. A page with the last of `tokens` is never given, so that something is left
        to compute. Returns how many leading tokens have their KV now.
        """
        pages = self._known.find(tokens, (len(tokens) - 1) // self.page_size)
        if len(pages) * self.page_size <= num_cached:
            return num_cached
        for page in pages:
            self._hold(page)
        self.release([request_id])
        self._pages[request_id] = array("i", pages)
        self._shared[request_id] = len(pages) * self.page_size
        return self._shared[request_id]

    def publish(self, request_id: str, tokens: Seq[int]) -> None:
        """Make the whole pages of `tokens` known, with which a sequence begins. Their KV is there, and final.

        Pages that are known already take the place of the sequence's own.
        """
        pages = self._pages.get(request_id, _NONE)
        whole = pages[: len(tokens) // self.page_size]
        for index, page in enumerate(self._known.add(tokens, whole)):
            if page != pages[index]:
                self._hold(page)
                pages[index], before = page, pages[index]
                self._drop(before)
        if whole:
            self._shared[request_id] = max(self._shared.get(request_id, 0), len(whole) * self.page_size)

    def forget(self) -> None:
        """No page is known any more. Sequences keep what they hold."""
        self._known.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def make_own(self, request_id: str, first: int) -> None:
        """Before a sequence is written to from its token `first` on: replace shared pages there, and note `copies`.

        Raises:
            OutOfMemoryError: the pool is full.
        """
        pages = self._pages[request_id]
        for index in range(first // self.page_size, len(pages)):
            page = pages[index]
            if self._holders[page] > 1:
                pages[index] = self._take()
                self.copies.append((page, pages[index]))
                self._drop(page)
            else:
                self._known.remove(page)
        whole = first // self.page_size * self.page_size
        self._shared[request_id] = min(self._shared.get(request_id, 0), whole)

    def _take(self) -> int:
        """A page for one sequence, which nobody finds: a free one, or else the one that is unused for the longest."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._known.remove(page)
        elif self.num_pages == self.max_pages:
            raise OutOfMemoryError(
                f"the KV cache is full: all of its {self.max_pages} pages of {self.page_size} tokens belong "
                f"to sequences. Raise kv_memory, or lower batch_size"
            )
        else:
            page = self.num_pages
            self._holders.append(0)
        self._holders[page] = 1
        return page

    def _hold(self, page: int) -> None:
        self._idle.pop(page, None)
        self._holders[page] += 1

    def _drop(self, page: int) -> None:
        """One sequence holds this page no longer: it is free after its last holder, or idle if known."""
        self._holders[page] -= 1
        if not self._holders[page]:
            if page in self._known:
                self._idle[page] = None
            else:
                self._free.append(page)


class _PrefixIndex:
    """A trie of whole pages, by which sequences that begin alike find each other's KV.

    A page is found by its tokens and by all tokens before it. A node has a number of its own, never used again. The key
    of a page is the number of the node before it, and its tokens. Keys are compared, and not only their hashes, so no
    collision ever finds the KV of another text.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._nodes: dict[_Key, tuple[int, int]] = {}  # node and page
        self._keys: dict[int, _Key] = {}  # by page
        self._num_nodes = 0

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def find(self, tokens: Seq[int], num_pages: int) -> list[int]:
        """The pages that hold the beginning of `tokens`, as far as there are any, and `num_pages` at most."""
        pages, node = list[int](), 0
        for first in range(0, num_pages * self._page_size, self._page_size):
            if (next_one := self._nodes.get((node, tuple(tokens[first : first + self._page_size])))) is None:
                break
            node, page = next_one
            pages.append(page)
        return pages

    def add(self, tokens: Seq[int], pages: Seq[int]) -> list[int]:
        """From now on, `pages` are found by `tokens`, which fill them. Returns the pages that are found.

        Some may differ from the given ones, where other pages hold the same tokens already.
        """
        by_tokens, node = list[int](), 0
        for index, page in enumerate(pages):
            key = node, tuple(tokens[index * self._page_size : (index + 1) * self._page_size])
            if key not in self._nodes:
                self.remove(page)  # if it was known by another text, then no longer
                self._num_nodes += 1
                self._keys[page] = key
                self._nodes[key] = self._num_nodes, page
            node, other = self._nodes[key]
            by_tokens.append(other)
        return by_tokens

    def remove(self, page: int) -> None:
        """A page is no longer found, nor are those after it."""
        if (key := self._keys.pop(page, None)) is not None:
            del self._nodes[key]

    def clear(self) -> None:
        """No page is found."""
        self._nodes.clear()
        self._keys.clear()
