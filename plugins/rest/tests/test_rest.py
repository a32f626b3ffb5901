"""The drafter: the output stays what it is whatever the store holds, and stores of other vocabularies are refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from emssd_rest import RestConfig
from emssd_rest.build import build_store
from emssd_rest.drafter import RestDrafter
from emssd_rest.store import Store
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from emssd import Engine
from emssd.drafting import DrafterContext
from emssd.drafting.checked import check_draft
from emssd.errors import ConfigError
from emssd.sequences import Batch, Request, Row
from emssd.testing.models import tiny_model
from tests.support.tree_drafts import chains_of

VOCAB_SIZE = 13


@cache
def target(architecture: str = "llama") -> Any:
    return tiny_model(architecture, seed=5, vocab_size=VOCAB_SIZE)


def made(folder: Path, documents: list[list[int]], **options: Any) -> str:
    build_store(folder / "store", documents, **options)
    return str(folder / "store")


def sequence(tokens: list[int], name: str = "a") -> Row:
    return Row(Request(name, tuple(tokens), 100))


def make_context(tokenizer: Any = None, vocab_size: int = VOCAB_SIZE) -> DrafterContext:
    def unwanted(*_: object) -> Any:
        pytest.fail("this drafter borrows nothing")

    return DrafterContext(vocab_size, tokenizer, unwanted, unwanted)


def make_tokenizer(num_words: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(num_words)})))


def test_each_row_gets_its_own_chain_within_its_budget(tmp_path: Path) -> None:
    text = [[3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 12], [3, 4, 11]]
    drafter = RestDrafter(RestConfig(num_speculative_tokens=4), Store.open(made(tmp_path, text)))
    assert drafter.num_speculative_tokens == 4
    batch = Batch(tuple(map(sequence, [[3, 4], [3, 4], [10, 3, 4, 5], [3, 4], [9], [4, 4]], "abcdef")))
    budget = [9, 1, 4, 0, 4, 4]
    draft = drafter.propose(batch, budget)
    check_draft(draft, batch, budget, VOCAB_SIZE)
    assert chains_of(draft) == [[5, 6, 7, 8], [5], [6, 7, 8, 9], [], [], []]


@pytest.mark.parametrize("name", ["num_speculative_tokens", "min_match", "max_match", "max_matches"])
def test_lengths_below_one_are_config_errors_that_name_the_option(tmp_path: Path, name: str) -> None:
    store = made(tmp_path, [[1, 2, 3]])
    with pytest.raises(ConfigError, match=rf"drafter\.{name} is 0; it must be at least 1"):
        RestDrafter.load(RestConfig(store, **{name: 0}), make_context())
    with pytest.raises(ConfigError, match=r"drafter\.min_match is 5 and drafter\.max_match 4"):
        RestDrafter.load(RestConfig(store, min_match=5, max_match=4), make_context())


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
        RestDrafter.load(config, make_context(make_tokenizer(13)))
    for same in (make_tokenizer(12), None):  # without one, the ids decide
        RestDrafter.load(config, make_context(same))


def test_a_store_with_ids_beyond_the_targets_vocabulary_is_refused(tmp_path: Path) -> None:
    config = RestConfig(made(tmp_path, [[1, VOCAB_SIZE]]))
    with pytest.raises(ConfigError, match=r"holds token ids up to 13, and the target's vocabulary has 13 tokens"):
        RestDrafter.load(config, make_context())
    RestDrafter.load(config, make_context(vocab_size=VOCAB_SIZE + 1))
