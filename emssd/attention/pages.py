"""Which pages of a KV pool belong to which sequence, as integers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from operator import sub

import numpy as np
from numpy.typing import NDArray

from emssd.attention.packed import PackedInputs
from emssd.errors import OutOfMemoryError

__all__ = ["PageTable"]


class PageTable:
    """Page lists of sequences over one pool that grows on demand.

    Args:
        page_size: tokens per page.
        max_pages: the pool grows no further; ``None`` for no limit.
    """

    def __init__(self, page_size: int, max_pages: int | None = None) -> None:
        self.page_size = page_size
        self.max_pages = max_pages
        self.num_pages = 0
        self._free: list[int] = []
        self._pages: dict[str, array[int]] = {}

    @property
    def num_used(self) -> int:
        """Pages that belong to a sequence."""
        return self.num_pages - len(self._free)

    def fits(self, lengths: Iterable[int]) -> bool:
        """Whether the pool could hold sequences of these lengths, and no others."""
        size = self.page_size
        return self.max_pages is None or sum([-(-length // size) for length in lengths]) <= self.max_pages

    def pages(self, request_id: str) -> list[int]:
        """The pages of a sequence in token order; empty if it is unknown."""
        return self._pages[request_id].tolist() if request_id in self._pages else []

    def indices(self, request_ids: Iterable[str], counts: Iterable[int]) -> NDArray[np.int32]:
        """``[sum(counts)]`` int32: the first `counts` pages of each of these sequences, one behind the other."""
        parts = [self._pages[request_id][:count] for request_id, count in zip(request_ids, counts, strict=True)]
        return np.frombuffer(bytearray().join(parts), dtype=np.int32)

    def reserve(self, request_id: str, num_tokens: int) -> None:
        """Give a sequence the pages that `num_tokens` tokens need. The pages that it has stay in place.

        Raises:
            OutOfMemoryError: the pool is full. A caller that asks `fits` first never sees this.
        """
        pages = self._pages.setdefault(request_id, array("i"))
        for _ in range(self._pages_for(num_tokens) - len(pages)):
            if not self._free:
                if self.num_pages == self.max_pages:
                    raise OutOfMemoryError(
                        f"the KV cache is full: all of its {self.max_pages} pages of {self.page_size} tokens belong "
                        f"to sequences. Raise kv_memory, or lower batch_size"
                    )
                self._free.append(self.num_pages)
                self.num_pages += 1
            pages.append(self._free.pop())

    def reserve_step(self, packed: PackedInputs) -> None:
        """Give the rows of a step their pages. First take back what a step took that was planned and not committed."""
        before = map(sub, packed.kv_lens, packed.lengths)
        self.truncate_all(zip(packed.request_ids, before, strict=True))
        size, held = self.page_size, self._pages  # a call for each row would take longer than all the rest
        for request_id, kv_len in zip(packed.request_ids, packed.kv_lens, strict=True):
            if request_id not in held or len(held[request_id]) * size < kv_len:
                self.reserve(request_id, kv_len)

    def truncate_all(self, rows: Iterable[tuple[str, int]]) -> None:
        """`truncate` sequences, each to its number of tokens."""
        size, held = self.page_size, self._pages  # as above
        for request_id, num_tokens in rows:
            if request_id in held and (len(held[request_id]) - 1) * size >= num_tokens:
                self.truncate(request_id, num_tokens)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Take back the pages behind the first `num_tokens` tokens."""
        pages = self._pages.get(request_id)
        while pages and (len(pages) - 1) * self.page_size >= num_tokens:  # its last page holds none of them
            self._free.append(pages.pop())

    def release(self, request_ids: Iterable[str]) -> None:
        """Take back all pages of these sequences. Unknown ids are no error."""
        for request_id in request_ids:
            self._free.extend(reversed(self._pages.pop(request_id, array("i"))))

    def slots(self, request_id: str, tokens: Iterable[int]) -> list[int]:
        """Pool slots (``page * page_size + offset``) of these tokens of a sequence."""
        pages, size = self._pages[request_id], self.page_size
        return [pages[token // size] * size + token % size for token in tokens]

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)
