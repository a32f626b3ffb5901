"""Strategies of requests without a model: prompts that repeat themselves, and what is accepted in each step."""

from __future__ import annotations

from hypothesis import strategies as st

from emssd.sequences import Request
from emssd.testing.conformance.scripted import Decision, Life
from emssd.testing.conformance.setting import BATCH_SIZE

__all__ = ["AGREEABLE", "decisions", "lives"]

AGREEABLE = Decision(limit=9, keep=9, agree=2, token=1)
"""Drafts are asked for, verified, and the first two tokens of each accepted."""


def decisions(vocab_size: int) -> st.SearchStrategy[Decision]:
    """What happens in a step: mostly all of a draft is verified, sometimes nothing is asked for or all is trimmed."""
    length = st.sampled_from([9, 9, 9, 3, 2, 1, 0])
    turn = st.sampled_from([0, 1, 2, 5])
    return st.builds(Decision, length, length, st.integers(0, 9), st.integers(0, vocab_size - 1), turn)


@st.composite
def lives(draw: st.DrawFn, vocab_size: int, min_size: int = 1, min_new_tokens: int = 1) -> list[Life]:
    """Requests that come at different times, at most as many as a batch has rows."""
    found = []
    for number in range(draw(st.integers(min_size, BATCH_SIZE))):
        pattern = draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=4))
        prompt = (pattern * 20)[: draw(st.sampled_from([1, 2, 3, 6, 12, 20]))]
        eos = draw(st.just(frozenset()) | st.frozensets(st.integers(0, vocab_size - 1), max_size=1))
        request = Request(f"r{number}", tuple(prompt), draw(st.integers(min_new_tokens, 24)), eos)
        script = draw(st.lists(decisions(vocab_size), min_size=1, max_size=5))
        found.append(Life(request, tuple(script), draw(st.integers(0, 4))))
    return found
