"""Prompt lookup against a reading of its definition, and against Transformers' own; through the engine, greedy exactly.

Oracle of outputs: `greedy_reference`, float64.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from emssd_pld import Occurrence, PLDConfig
from emssd_pld.drafter import PLDDrafter
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from emssd import Engine
from emssd.drafting import Draft, Drafter
from emssd.errors import ConfigError
from emssd.sequences import Batch, Request, Row
from emssd.testing.models import tiny_model
from tests.support.tiers import looped

TOKENS = st.integers(3, 5)  # three letters: matches are everywhere
CONFIGS = st.builds(
    lambda sizes, **options: PLDConfig(max_ngram_size=max(sizes), min_ngram_size=min(sizes), **options),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    num_speculative_tokens=st.integers(1, 8),
    occurrence=st.sampled_from(Occurrence),
    require_full_copy=st.booleans(),
)


def by_definition(config: PLDConfig, tokens: list[int], budget: int) -> list[int]:
    """All windows of each size, the longest first, are compared with the end of the text."""
    num_tokens, copied = len(tokens), config.num_speculative_tokens
    for size in range(config.max_ngram_size, config.min_ngram_size - 1, -1):
        behind = [end for end in range(size, num_tokens) if tokens[end - size : end] == tokens[-size:]]
        if config.require_full_copy:
            behind = [end for end in behind if end + copied <= num_tokens and end < num_tokens - size]
        if behind:
            place = behind[0] if config.occurrence is Occurrence.first else behind[-1]
            return tokens[place:][:copied][:budget]
    return []


def sequence(prompt: Seq[int], output: Seq[int] = (), name: str = "a") -> Row:
    return Row(Request(name, tuple(prompt), 100), [*prompt, *output])


def split(draft: Draft) -> list[list[int]]:
    tokens = draft.token_ids.tolist()
    return [tokens[start:stop] for start, stop in zip(draft.indptr, draft.indptr[1:], strict=False)]


def chains(drafter: Drafter, rows: Seq[Row], budget: Seq[int]) -> list[list[int]]:
    return split(drafter.propose(Batch(tuple(rows)), budget))


@given(
    config=CONFIGS,
    prompts=st.lists(st.lists(TOKENS, min_size=1, max_size=24), min_size=3, max_size=3),
    steps=st.lists(
        st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=6), st.integers(0, 9)), min_size=3, max_size=3),
        max_size=8,
    ),
)
def test_the_growing_index_gives_what_the_definition_gives(
    config: PLDConfig, prompts: list[list[int]], steps: list[list[tuple[list[int], int]]]
) -> None:
    drafter = PLDDrafter(config)
    rows = [sequence(prompt, name=str(i)) for i, prompt in enumerate(prompts)]
    for step in [[([], 9)] * 3, *steps]:
        for row, (new, _) in zip(rows, step, strict=True):
            row.extend(new)
        budget = [limit for _, limit in step]
        expected = [by_definition(config, row.tokens, limit) for row, limit in zip(rows, budget, strict=True)]
        assert chains(drafter, rows, budget) == expected


@given(size=st.integers(1, 4), copied=st.integers(1, 8), tokens=st.lists(TOKENS, min_size=2, max_size=40))
def test_with_the_options_of_transformers_it_drafts_what_transformers_drafts(
    size: int, copied: int, tokens: list[int]
) -> None:
    theirs = PromptLookupCandidateGenerator(None, copied, size, max_length=1000)
    candidates, _ = theirs.get_candidates(torch.tensor([tokens]))
    config = PLDConfig(max_ngram_size=size, num_speculative_tokens=copied, require_full_copy=False)
    assert chains(PLDDrafter(config), [sequence(tokens)], [copied]) == [candidates[0, len(tokens) :].tolist()]


def test_the_defaults_are_the_published_ones_the_first_longest_match_with_ten_tokens_behind_it() -> None:
    text = [5, 9, *range(20, 32), 3, 4, 5, *range(40, 52), 3, 4, 5, 60, 61, 3, 4, 5]
    drafter = PLDDrafter(PLDConfig())
    assert chains(drafter, [sequence(text)], [10]) == [list(range(40, 50))]  # not behind the 5 in front
    assert chains(drafter, [sequence([5, *range(20, 32)], [4, 5], name="b")], [10]) == [list(range(20, 30))]
    assert chains(drafter, [sequence([3, 4, 5, 60, 61, 3, 4, 5], name="c")], [10]) == [[]]  # too little to copy


@looped(
    ("options", "expected"),
    [
        ({}, [10, 11, 3]),
        ({"occurrence": Occurrence.last}, [20, 21, 3]),
        ({"occurrence": "last", "require_full_copy": False}, [30, 3, 4]),
        ({"occurrence": Occurrence.last, "num_speculative_tokens": 1, "max_ngram_size": 1}, [30]),
        ({"max_ngram_size": 3, "min_ngram_size": 3}, []),
    ],
)
def test_what_each_option_does(options: dict[str, Any], expected: list[int]) -> None:
    text = [3, 4, 10, 11, 3, 4, 20, 21, 3, 4, 30, 3, 4]
    config = PLDConfig(**({"num_speculative_tokens": 4} | options))
    assert chains(PLDDrafter(config), [sequence(text)], [3]) == [expected]


@looped(
    "options",
    [
        {"max_ngram_size": 0},
        {"min_ngram_size": 0},
        {"min_ngram_size": 4},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": -1},
    ],
)
def test_sizes_that_cannot_be_are_config_errors_that_name_the_option(options: dict[str, int]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=rf"drafter\.{name} is {value}.*at least 1"):
        Engine.from_model(tiny_model(), drafter=PLDConfig(**options))  # type: ignore[arg-type]


def test_an_occurrence_that_does_not_exist_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"drafter\.occurrence is 'middle'; choose first or last"):
        PLDDrafter(PLDConfig(occurrence="middle"))  # type: ignore[arg-type]
