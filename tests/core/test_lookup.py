"""The index of a growing text: it finds what a search finds, and reads each n-gram once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting.lookup import NGramIndex, Occurrence


class Watched(list[int]):
    """Counts where each slice begins that is read."""

    def __init__(self, tokens: list[int], read: Counter[int]) -> None:
        super().__init__(tokens)
        self._read = read

    def __getitem__(self, key: Any) -> Any:
        self._read[key.start] += 1
        return super().__getitem__(key)


@given(
    size=st.integers(1, 4),
    num_behind=st.integers(1, 8),
    occurrence=st.sampled_from(Occurrence),
    num_places=st.integers(1, 3),
    text=st.lists(st.integers(3, 5), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_each_n_gram_is_read_once_however_the_text_grows(
    size: int, num_behind: int, occurrence: Occurrence, num_places: int, text: list[int], cuts: list[int]
) -> None:
    read: Counter[int] = Counter()
    index = NGramIndex(size, num_behind, occurrence, num_places)
    for cut in [*sorted(cut for cut in cuts if cut <= len(text)), len(text), len(text)]:
        index.extend(Watched(text[:cut], read), cut)
        places = [
            start + size
            for start in range(cut - size - num_behind + 1)
            if text[start : start + size] == text[:cut][-size:]
        ]
        chosen = places if occurrence is Occurrence.first else places[::-1]
        assert list(index.find(text[:cut])) == chosen[:num_places]
    assert read == Counter(range(max(0, len(text) - size - num_behind + 1)))
