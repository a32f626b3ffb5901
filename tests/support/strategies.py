"""Hypothesis strategies that several test files share: prompts, and steps."""

from __future__ import annotations

from hypothesis import strategies as st


def prompt_batches(vocab_size: int, max_prompts: int = 4, max_length: int = 12) -> st.SearchStrategy[list[list[int]]]:
    """Prompts of ragged lengths, at least one; equal ones occur."""
    prompts = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=max_length)
    return st.lists(prompts, min_size=1, max_size=max_prompts)


def step_histories(num_rows: int) -> st.SearchStrategy[list[list[tuple[int, int]]]]:
    """Decoding steps: of each step, per row, how many tokens are drafted and how many of them are accepted."""
    row = st.integers(0, 7).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
    step = st.lists(row, min_size=num_rows, max_size=num_rows)
    return st.lists(step, min_size=1, max_size=6)
