"""Drafters and Hypothesis strategies that several test files share: EOS at random places, prompts, drafts, steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from emssd_testing.drafters import RandomDrafter
from emssd_testing.strategies import drafters
from hypothesis import strategies as st

from emssd.drafting import Drafter
from emssd.sequences import Row


class EosDrafter(RandomDrafter):
    """Drafts like `RandomDrafter`, with an EOS at a random place: after right tokens, in rubbish, first or last.

    Args:
        eos_token_ids: the ids to inject, at least one.
        vocab_size, num_speculative_tokens, references, seed: see `RandomDrafter`.
    """

    def __init__(
        self,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        num_speculative_tokens: int = 4,
        references: Mapping[Any, Seq[int]] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(vocab_size, num_speculative_tokens, references, seed=seed)
        self._eos_token_ids = sorted(eos_token_ids)

    def chain(self, row: Row, limit: int) -> list[int]:
        chain = super().chain(row, limit)
        if chain:
            chain[self._random.randrange(len(chain))] = self._random.choice(self._eos_token_ids)
        return chain


@st.composite
def drafters_with_eos(
    draw: st.DrawFn,
    vocab_size: int,
    references: Mapping[Any, Seq[int]],
    eos_token_ids: Seq[int],
    *,
    with_trees: bool = False,
) -> Drafter:
    """`emssd_testing.strategies.drafters`, and in one of six cases an `EosDrafter` if there is an EOS."""
    if not eos_token_ids or not draw(st.sampled_from([False] * 5 + [True])):
        return draw(drafters(vocab_size, references, with_trees=with_trees))
    num_tokens, seed = draw(st.integers(0, 6)), draw(st.integers(0, 2**16))
    return EosDrafter(eos_token_ids, vocab_size, num_tokens, references, seed=seed)


def prompts(vocab_size: int, max_length: int = 12) -> st.SearchStrategy[list[int]]:
    """Token ids of one prompt, at least one."""
    return st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=max_length)


def prompt_batches(vocab_size: int, max_prompts: int = 4, max_length: int = 12) -> st.SearchStrategy[list[list[int]]]:
    """Prompts of ragged lengths, at least one; equal ones occur."""
    return st.lists(prompts(vocab_size, max_length), min_size=1, max_size=max_prompts)


def step_histories(
    num_rows: int, max_steps: int = 6, max_drafted: int = 7
) -> st.SearchStrategy[list[list[tuple[int, int]]]]:
    """Decoding steps: of each step, per row, how many tokens are drafted and how many of them are accepted."""
    row = st.integers(0, max_drafted).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
    step = st.lists(row, min_size=num_rows, max_size=num_rows)
    return st.lists(step, min_size=1, max_size=max_steps)
