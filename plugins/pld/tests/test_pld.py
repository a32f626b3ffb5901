"""Prompt lookup against Transformers' own, and what its options mean.

`tests.drafting.test_lookup` holds its drafts against a search of the whole text.
"""

from __future__ import annotations

import pytest
import torch
from emssd_pld import PLDConfig, PLDDrafter
from emssd_testing.models import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from emssd import Engine
from emssd.errors import ConfigError
from emssd.sequences import Batch, Row
from tests.support.trees import row_of

TOKENS = st.integers(3, 5)  # three letters: matches are everywhere


def chain(drafter: PLDDrafter, row: Row, budget: int) -> list[int]:
    return drafter.propose(Batch((row,)), [budget]).token_ids.tolist()


@given(size=st.integers(1, 4), copied=st.integers(1, 8), tokens=st.lists(TOKENS, min_size=2, max_size=40))
def test_with_the_options_of_transformers_it_drafts_what_transformers_drafts(
    size: int, copied: int, tokens: list[int]
) -> None:
    theirs = PromptLookupCandidateGenerator(None, copied, size, max_length=1000)
    candidates, _ = theirs.get_candidates(torch.tensor([tokens]))
    config = PLDConfig(max_ngram_size=size, num_speculative_tokens=copied, require_full_copy=False)
    assert chain(PLDDrafter(config), row_of(tokens), copied) == candidates[0, len(tokens) :].tolist()


def test_the_defaults_are_the_published_ones_the_first_longest_match_with_ten_tokens_behind_it() -> None:
    text = [5, 9, *range(20, 32), 3, 4, 5, *range(40, 52), 3, 4, 5, 60, 61, 3, 4, 5]
    drafter = PLDDrafter(PLDConfig())
    assert chain(drafter, row_of(text), 10) == list(range(40, 50))  # not after the 5 in front
    assert chain(drafter, row_of([5, *range(20, 32)], [4, 5], name="b"), 10) == list(range(20, 30))
    assert chain(drafter, row_of([3, 4, 5, 60, 61, 3, 4, 5], name="c"), 10) == []  # too little to copy


def test_sizes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"drafter\.min_ngram_size is 4; it must be at most drafter\.max_ngram_"):
        Engine.from_model(tiny_model(), drafter=PLDConfig(min_ngram_size=4))
