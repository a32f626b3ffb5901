"""LLMA against a reading of its definition from scratch: which earlier place is copied from, and how much."""

from __future__ import annotations

from typing import Any

import pytest
from emssd_llma import LLMAConfig, Occurrence, Search
from emssd_llma.drafter import LLMADrafter
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd import Engine
from emssd.errors import ConfigError
from emssd.sequences import Batch, Request, Row
from emssd.testing.models import tiny_model
from tests.support.tiers import looped

CONFIGS = st.builds(
    LLMAConfig,
    match_length=st.integers(1, 4),
    copy_length=st.integers(1, 8),
    search=st.sampled_from(Search),
    occurrence=st.sampled_from(Occurrence),
    require_full_copy=st.booleans(),
)
TOKENS = st.integers(3, 5)  # three letters: matches are everywhere


def brute_force(config: LLMAConfig, tokens: list[int], num_prompt: int, budget: int) -> list[int]:
    """The definition: of all places where the latest tokens stand with enough behind them, copy from one."""
    size = config.match_length
    text = tokens[:num_prompt] if config.search is Search.prompt else tokens
    needed = config.copy_length if config.require_full_copy else 1
    behind = [
        start + size
        for start in range(len(text))
        if len(tokens) >= size and text[start : start + size] == tokens[-size:] and start + size + needed <= len(text)
    ]
    if not behind:
        return []
    chosen = behind[0] if config.occurrence is Occurrence.first else behind[-1]
    return text[chosen:][: config.copy_length][:budget]


def sequence(prompt: list[int], output: list[int] | None = None, name: str = "a") -> Row:
    return Row(Request(name, tuple(prompt), 100), [*prompt, *(output or [])])


def chains(drafter: LLMADrafter, rows: list[Row], budget: list[int]) -> list[list[int]]:
    draft = drafter.propose(Batch(tuple(rows)), budget)
    tokens = draft.token_ids.tolist()
    return [tokens[start:stop] for start, stop in zip(draft.indptr, draft.indptr[1:], strict=False)]


@settings(deadline=None)
@given(
    config=CONFIGS,
    prompts=st.lists(st.lists(TOKENS, min_size=1, max_size=24), min_size=1, max_size=3),
    growth=st.lists(st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=3, max_size=3), max_size=8),
    budget=st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
def test_the_growing_index_gives_what_a_search_from_scratch_gives(
    config: LLMAConfig, prompts: list[list[int]], growth: list[list[list[int]]], budget: list[int]
) -> None:
    drafter = LLMADrafter(config)
    rows = [sequence(prompt, name=str(i)) for i, prompt in enumerate(prompts)]
    for step in [[[], [], []], *growth]:
        for row, new in zip(rows, step, strict=False):
            row.extend(new)
        limits = budget[: len(rows)]
        expected = [
            brute_force(config, row.tokens, len(prompt), limit)
            for row, prompt, limit in zip(rows, prompts, limits, strict=True)
        ]
        assert chains(drafter, rows, limits) == expected


def test_the_defaults_are_the_papers_setting_prompt_only_last_match_and_a_full_copy() -> None:
    prompt = [3, 4, 10, 11, 12, 13, 14, 15, 16, 17, 3, 4, 20, 21, 22, 23, 24, 25, 26, 27, 3, 4, 30, 3, 4]
    drafter = LLMADrafter(LLMAConfig())
    # The last (3, 4) with seven tokens behind it; the one before 30 has only three.
    assert chains(drafter, [sequence(prompt)], [7]) == [[20, 21, 22, 23, 24, 25, 26]]
    # Nothing is found in the output, however often it repeats itself.
    repeating = sequence(prompt, [8, 9] * 10, name="b")
    assert chains(drafter, [repeating], [7]) == [[]]


@looped(
    ("options", "expected"),
    [
        ({"occurrence": Occurrence.first}, [10, 11, 3]),
        ({"occurrence": Occurrence.last}, [20, 21, 3]),
        ({"occurrence": Occurrence.last, "require_full_copy": False}, [30, 3, 4]),
        ({"occurrence": Occurrence.last, "copy_length": 1}, [30]),
        ({"match_length": 1, "require_full_copy": False}, [30, 3, 4]),
        ({"match_length": 3}, []),
    ],
)
def test_what_each_option_does(options: dict[str, Any], expected: list[int]) -> None:
    text = [3, 4, 10, 11, 3, 4, 20, 21, 3, 4, 30, 3, 4]
    config = LLMAConfig(**({"copy_length": 4} | options))
    (chain,) = chains(LLMADrafter(config), [sequence(text)], [3])
    assert chain == expected


def test_a_released_request_is_forgotten_and_its_name_can_be_used_again() -> None:
    drafter = LLMADrafter(LLMAConfig(copy_length=2))
    assert chains(drafter, [sequence([3, 4, 5, 6, 3, 4])], [7]) == [[5, 6]]
    drafter.release(["a", "never seen"])
    assert chains(drafter, [sequence([9, 9, 8, 8, 3, 4])], [7]) == [[]]
    assert chains(drafter, [sequence([9, 9, 8, 8, 3, 4], [9, 9])], [7]) == [[8, 8]]


def test_after_a_run_no_index_is_left() -> None:
    drafter = LLMADrafter(LLMAConfig())
    engine = Engine.from_model(tiny_model(), drafter=drafter, batch_size=2)
    engine.generate([[3, 4] * 6, [5, 6, 7], [8, 9] * 5], 12)
    assert drafter._indexes == {}


@pytest.mark.parametrize("options", [{"match_length": 0}, {"match_length": -2}, {"copy_length": 0}], ids=str)
def test_lengths_below_one_are_config_errors_that_name_the_options(options: dict[str, int]) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(ConfigError, match=rf"drafter\.{name} is {value}.*at least 1"):
        LLMADrafter(LLMAConfig(**options))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        Engine.from_model(tiny_model(), drafter=LLMAConfig(**options))  # type: ignore[arg-type]


def test_choices_may_be_given_as_text_and_a_wrong_one_is_refused() -> None:
    row = Row(Request("a", (1, 2, 3), 9))
    row.extend([8, 9, 7, 8, 9])
    drafter = LLMADrafter(LLMAConfig(copy_length=1, search="prompt_and_output", occurrence="first"))  # type: ignore[arg-type]
    assert drafter.propose(Batch((row,)), [1]).token_ids.tolist() == [7]
    with pytest.raises(ConfigError, match="choose prompt or prompt_and_output, and first or last"):
        LLMADrafter(LLMAConfig(search="output"))  # type: ignore[arg-type]
