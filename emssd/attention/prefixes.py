"""The pages that hold the beginning of a text: the index by which sequences that begin alike find each other's KV."""

from __future__ import annotations

from collections.abc import Sequence as Seq

__all__ = ["PrefixIndex"]

_Key = tuple[int, tuple[int, ...]]  # the node before, and the tokens of the page


class PrefixIndex:
    """A trie of whole pages. A page is found by its tokens and by all tokens before it.

    A node has a number of its own, never used again. The key of a page is the number of the node before it, and its
    tokens. Keys are compared, and not only their hashes, so no collision ever finds the KV of another text.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._found: dict[_Key, tuple[int, int]] = {}  # node and page
        self._keys: dict[int, _Key] = {}  # by page
        self._num_nodes = 0

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, tokens: Seq[int], num_pages: int) -> list[int]:
        """The pages that hold the beginning of `tokens`, as far as there are any, and `num_pages` at most."""
        pages, node = list[int](), 0
        for first in range(0, num_pages * self._page_size, self._page_size):
            if (next_one := self._found.get((node, tuple(tokens[first : first + self._page_size])))) is None:
                break
            node, page = next_one
            pages.append(page)
        return pages

    def add(self, tokens: Seq[int], pages: Seq[int]) -> list[int]:
        """From now on, `pages` are found by `tokens`, which fill them. Returns the pages that are found.

        Some may differ from those given, where others hold the same tokens already.
        """
        found, node = list[int](), 0
        for place, page in enumerate(pages):
            key = node, tuple(tokens[place * self._page_size : (place + 1) * self._page_size])
            if key not in self._found:
                self.remove(page)  # if it was known by another text, then no longer
                self._num_nodes += 1
                self._keys[page] = key
                self._found[key] = self._num_nodes, page
            node, other = self._found[key]
            found.append(other)
        return found

    def remove(self, page: int) -> None:
        """A page is no longer found, nor are those after it."""
        if (key := self._keys.pop(page, None)) is not None:
            del self._found[key]

    def clear(self) -> None:
        """No page is found."""
        self._found.clear()
        self._keys.clear()
