"""The drafter: the output stays what it is whatever the store holds, and stores of other vocabularies are refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from emssd_rest import RestConfig, search
from emssd_rest.build import build_store
from emssd_rest.drafter import RestDrafter, open_store
from emssd_rest.store import Store
from emssd_testing.models import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from emssd import Engine
from emssd.drafting import DrafterContext
from emssd.errors import ConfigError
from emssd.sequences import Batch
from tests.support.trees import chains_of, paths_of, row_of, sequence, tree_of

VOCAB_SIZE = 13


@cache
def target(architecture: str = "llama") -> Any:
    return tiny_model(architecture, seed=5, vocab_size=VOCAB_SIZE)


def made(folder: Path, documents: list[list[int]], **options: Any) -> str:
    build_store(folder / "store", documents, **options)
    return str(folder / "store")


def make_context(tokenizer: Any = None, vocab_size: int = VOCAB_SIZE) -> DrafterContext:
    def unwanted(*_: object) -> Any:
        pytest.fail("this drafter borrows nothing")

    return DrafterContext(vocab_size, tokenizer, unwanted, unwanted)


def make_tokenizer(num_words: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(num_words)})))


def test_each_row_gets_its_own_chain_within_its_budget(tmp_path: Path) -> None:
    text = [[3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 12], [3, 4, 11]]
    drafter = RestDrafter(RestConfig(num_speculative_tokens=4), opened(tmp_path, text))
    assert drafter.num_speculative_tokens == 4
    batch = Batch(tuple(map(sequence, [[3, 4], [3, 4], [10, 3, 4, 5], [3, 4], [9], [4, 4], [8, 9]], "abcdefg")))
    budget = [9, 1, 4, 0, 4, 4, 4]
    draft = drafter.propose(batch, budget)
    draft.check(batch, budget, VOCAB_SIZE)
    assert chains_of(draft) == [[5, 6, 7, 8], [5], [6, 7, 8, 9], [], [], [], []]


def test_lengths_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    store = opened(tmp_path, [[1, 2, 3]])
    with pytest.raises(ConfigError, match=r"drafter\.min_match is 5 and drafter\.max_match 4"):
        RestDrafter(RestConfig(min_match=5, max_match=4), store)
    with pytest.raises(ConfigError, match=r"drafter\.num_nodes is 9 and drafter\.branches 1; a tree has at least 2"):
        RestDrafter(RestConfig(num_nodes=9), store)


def test_a_store_that_is_not_given_or_not_there_is_a_config_error_that_says_how_to_make_one() -> None:
    with pytest.raises(ConfigError, match=r"give drafter\.store=FOLDER.*emssd-rest build"):
        Engine.from_model(target(), drafter="rest")
    with pytest.raises(ConfigError, match=r"/nowhere: no such folder.*emssd-rest build"):
        Engine.from_model(target(), drafter=RestConfig("/nowhere"))


def test_a_store_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    config = RestConfig(made(tmp_path, [[1, 2, 3]], tokenizer=make_tokenizer(12)))
    with pytest.raises(
        ConfigError, match=r"its tokenizer \(12 tokens\) is not the target's \(13 tokens\); build one with --tokenizer"
    ):
        open_store(config, make_context(make_tokenizer(13)))
    for same in (make_tokenizer(12), None):  # without one, the ids decide
        open_store(config, make_context(same))


def test_a_store_with_ids_beyond_the_targets_vocabulary_is_refused(tmp_path: Path) -> None:
    config = RestConfig(made(tmp_path, [[1, VOCAB_SIZE]]))
    with pytest.raises(ConfigError, match=r"holds token ids up to 13, and the target's vocabulary has 13 tokens"):
        open_store(config, make_context())
    open_store(config, make_context(vocab_size=VOCAB_SIZE + 1))


TOKENS = st.integers(0, 2)  # three letters: matches are everywhere
TEXTS = st.lists(st.lists(TOKENS, max_size=12), min_size=1, max_size=20).filter(any)


def opened(folder: Path, documents: list[list[int]]) -> Store:
    return Store.open(made(folder, documents))


def continuations(config: RestConfig, documents: list[list[int]], tokens: list[int]) -> list[list[int]]:
    """Return what follows each place of the longest end of `tokens` that stands in the documents."""
    for size in range(min(config.max_match, len(tokens)), config.min_match - 1, -1):
        texts = [
            text[end:]
            for text in documents
            for end in range(size, len(text) + 1)
            if text[end - size : end] == tokens[-size:]
        ]
        if texts:
            return texts
    return []


@given(
    documents=TEXTS,
    few=st.sampled_from([0, 2, 48]),
    tokens=st.lists(TOKENS | st.just(9), min_size=1, max_size=10),
    num_speculative_tokens=st.integers(1, 5),
    min_match=st.integers(1, 3),
    more=st.integers(0, 5),
    branches=st.integers(1, 5),
    budget=st.integers(0, 20),
    num_remaining=st.integers(1, 8),
)
def test_the_tree_is_made_of_the_most_frequent_prefixes(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    few: int,
    tokens: list[int],
    min_match: int,
    more: int,
    budget: int,
    num_remaining: int,
    **options: int,
) -> None:
    config = RestConfig(min_match=min_match, max_match=min_match + more, **options)
    drafter = RestDrafter(config, opened(tmp_path_factory.mktemp("text"), documents))
    row, depth = row_of(tokens, max_new_tokens=num_remaining), min(config.num_speculative_tokens, num_remaining - 1)
    budget = budget if config.branches > 1 else min(budget, depth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_FEW", few)  # lists, arrays, and first one and then the other
        draft = tree_of(drafter, row, budget)
    texts, drafted = [text[:depth] for text in continuations(config, documents, tokens)], paths_of(draft)
    counts = {
        tuple(text[:size]): sum(other[:size] == text[:size] for other in texts)
        for text in texts
        for size in range(len(text) + 1)
    }
    assert set(drafted) <= set(counts)
    worths = [counts[path] for path in drafted]
    assert worths == sorted(worths, reverse=True)
    assert draft.confidence is not None
    assert list(draft.confidence) == [counts[path] / counts[path[:-1]] for path in drafted]
    ends = [path for path in drafted if not any(other[:-1] == path for other in drafted)]
    assert len(ends) <= config.branches
    if config.branches == 1:
        chain = [()]
        while following := [path for path in counts if path and path[:-1] == chain[-1]]:
            chain.append(min(following, key=lambda path: (-counts[path], path)))
        assert drafted == chain[1 : budget + 1]
    elif len(ends) < config.branches:
        assert worths == sorted((count for path, count in counts.items() if path), reverse=True)[:budget]
