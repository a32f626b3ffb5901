"""Prompt lookup with branches: the tree holds what followed each of so many earlier places, and nothing else.

Oracle of outputs: `greedy_reference`, float64.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from emssd_llma import LLMAConfig, Search
from emssd_llma.drafter import LLMADrafter
from emssd_pld import Occurrence, PLDConfig
from emssd_pld.drafter import PLDDrafter
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting import Draft, Drafter
from emssd.drafting.checked import check_draft
from emssd.errors import ConfigError
from emssd.sequences import Batch, Row
from tests.support.engine_machine import EngineMachine
from tests.support.preemption import run_with_preemption
from tests.support.tree_drafts import decode_with_trees, paths_of, row_of, tree_of

TOKENS = st.integers(3, 5)  # three letters: matches are everywhere
OPTIONS: dict[str, Any] = {
    "occurrence": st.sampled_from(Occurrence),
    "require_full_copy": st.booleans(),
    "branches": st.integers(1, 4),
}
LLMA = st.builds(
    LLMAConfig,
    match_length=st.integers(1, 3),
    copy_length=st.integers(1, 5),
    search=st.sampled_from(Search),
    **OPTIONS,
)
PLD = st.builds(PLDConfig, max_ngram_size=st.integers(1, 3), num_speculative_tokens=st.integers(1, 5), **OPTIONS)
CONFIGS = LLMA | PLD


def make(config: LLMAConfig | PLDConfig) -> LLMADrafter | PLDDrafter:
    return LLMADrafter(config) if isinstance(config, LLMAConfig) else PLDDrafter(config)


def copies(config: LLMAConfig | PLDConfig, row: Row) -> list[list[int]]:
    """By definition: what stands behind each place that is copied from, in the order of choice."""
    tokens = list(row.tokens)
    if isinstance(config, LLMAConfig):
        text = tokens[: len(row.request.prompt_ids)] if config.search is Search.prompt else tokens
        sizes, copied = [config.match_length], config.copy_length
    else:
        text, sizes, copied = tokens, list(range(config.max_ngram_size, 0, -1)), config.num_speculative_tokens
    for size in sizes:
        needed = copied if config.require_full_copy else 1
        if config.require_full_copy and isinstance(config, PLDConfig):
            needed = max(needed, size + 1)
        ends = [
            end
            for end in range(size, len(text) - needed + 1)
            if len(tokens) >= size and text[end - size : end] == tokens[-size:]
        ]
        if ends:
            chosen = ends if config.occurrence is Occurrence.first else ends[::-1]
            return [text[end:][:copied] for end in chosen[: config.branches]]
    return []


@given(
    config=CONFIGS,
    prompt=st.lists(TOKENS, min_size=1, max_size=24),
    growth=st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=6), st.integers(0, 9)), max_size=6),
    num_remaining=st.integers(1, 8),
)
def test_the_tree_is_the_trie_of_the_copies_and_the_common_tokens_come_first(
    config: LLMAConfig | PLDConfig, prompt: list[int], growth: list[tuple[list[int], int]], num_remaining: int
) -> None:
    drafter = make(config)
    assert drafter.drafts_trees == (config.branches > 1)
    grown = sum(len(new) for new, _ in growth)
    row = row_of(prompt, max_new_tokens=grown + num_remaining)
    for new, budget in [([], 9), *growth]:
        row.extend(new)
        depth = row.num_remaining - 1
        budget = budget if drafter.drafts_trees else min(budget, depth)
        cut = [copy[:depth] for copy in copies(config, row)]
        prefixes = {tuple(copy[:size]) for copy in cut for size in range(1, len(copy) + 1)}
        share = {path: Fraction(sum(tuple(copy[: len(path)]) == path for copy in cut), len(cut)) for path in prefixes}
        draft = tree_of(drafter, row, budget)
        found = paths_of(draft)
        assert len(set(found)) == len(found) == min(budget, len(prefixes), drafter.num_speculative_tokens)
        assert [share[path] for path in found] == sorted(share.values(), reverse=True)[: len(found)]
        for path, chance in zip(found, draft.confidence or (), strict=drafter.drafts_trees):
            assert chance == pytest.approx(float(share[path] / share.get(path[:-1], Fraction(1))))


@given(config=CONFIGS, text=st.lists(TOKENS, min_size=1, max_size=40))
def test_the_chain_of_one_branch_is_a_path_of_the_tree(config: LLMAConfig | PLDConfig, text: list[int]) -> None:
    chain = tree_of(make(replace(config, branches=1)), row_of(text), 99)
    tree = tree_of(make(config), row_of(text), 99)
    assert chain.parents is None
    assert set(paths_of(chain)) <= set(paths_of(tree))


def test_one_tree_of_a_text_that_went_on_in_three_ways() -> None:
    text = [3, 4, 10, 11, 3, 4, 10, 12, 3, 4, 20, 21, 3, 4]
    config = PLDConfig(max_ngram_size=2, num_speculative_tokens=2, occurrence=Occurrence.last, branches=3)
    draft = tree_of(PLDDrafter(config), row_of(text), 99)
    assert paths_of(draft) == [(10,), (10, 12), (10, 11), (20,), (20, 21)]
    assert draft.confidence == (2 / 3, 0.5, 0.5, 1 / 3, 1.0)
    latest_two = PLDConfig(max_ngram_size=2, num_speculative_tokens=2, occurrence=Occurrence.last, branches=2)
    assert paths_of(tree_of(PLDDrafter(latest_two), row_of(text), 99)) == [(20,), (20, 21), (10,), (10, 12)]
    first_two = PLDConfig(max_ngram_size=2, num_speculative_tokens=2, branches=2)
    assert paths_of(tree_of(PLDDrafter(first_two), row_of(text), 99)) == [(10,), (10, 11), (10, 12)]


@pytest.mark.parametrize("branches", [0, -1])
def test_no_branch_is_a_config_error(branches: int) -> None:
    for config in (LLMAConfig(branches=branches), PLDConfig(branches=branches)):
        with pytest.raises(ConfigError, match=rf"^drafter\.branches is {branches}; it must be at least 1"):
            make(config)


@pytest.mark.parametrize(
    "config",
    [
        LLMAConfig(1, 3, Search.prompt_and_output, require_full_copy=False, branches=3),
        PLDConfig(2, num_speculative_tokens=3, require_full_copy=False, branches=4),
    ],
    ids=lambda config: type(config).__name__,
)
def test_outputs_are_greedy_and_siblings_of_the_first_choice_are_accepted(config: LLMAConfig | PLDConfig) -> None:
    prompts = [[3, 4, 5] * 4, [7], [8, 9, 8, 10, 8], [1, 2, 1, 3, 1, 4, 1]]
    trees, chains = (decode_with_trees(make(each), prompts) for each in (config, replace(config, branches=1)))
    assert trees.report.num_accepted > chains.report.num_accepted > 0
    assert trees.report.num_steps < chains.report.num_steps


class Checked(LLMADrafter):
    """Drafts what a drafter without a past drafts."""

    def __init__(self, config: LLMAConfig) -> None:
        super().__init__(config)
        self.config = config

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        draft = super().propose(batch, budget)
        check_draft(draft, batch, budget, 11, trees=self.drafts_trees)
        for row, (sequence, limit) in enumerate(zip(batch, budget, strict=True)):
            alone = LLMADrafter(self.config).propose(Batch((sequence,)), [limit])
            assert paths_of(draft, row) == paths_of(alone)
        return draft


class LookupMachine(EngineMachine):
    def drafters(self) -> st.SearchStrategy[Drafter | Seq[Drafter]]:
        return LLMA.map(Checked)


@pytest.mark.hypothesis
def test_after_any_arrivals_and_preemptions_it_drafts_as_if_new_and_outputs_are_greedy() -> None:
    run_with_preemption(LookupMachine, share=8, num_steps=12)
