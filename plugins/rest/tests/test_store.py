"""Stores: what they keep, and what is refused."""

from __future__ import annotations

import builtins
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emssd_rest import RestConfig
from emssd_rest.build import build_store
from emssd_rest.drafter import RestDrafter
from emssd_rest.search import StoreSearch
from emssd_rest.store import END, Header, Store, fingerprint
from transformers import AutoTokenizer

from emssd.data.demo import model_path
from emssd.errors import ConfigError, OutputError
from emssd.sequences import Batch, Request, Row
from tests.support.tiers import looped


def made(folder: Path, documents: list[list[int]], **options: Any) -> Store:
    build_store(folder, documents, **options)
    return Store.open(folder)


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path("target"))


def chain(searched: StoreSearch, match: int, places: range, num_tokens: int, most: int = 5000) -> list[int]:
    """The most frequent tokens after a match, of at most so many places, one after another."""
    return searched.tree(searched.behind(match, places, most), num_tokens, num_tokens, 1).token_ids


@pytest.mark.parametrize(("largest", "kind"), [(65_534, ">u2"), (65_535, ">u4"), (200_000, ">u4")])
def test_ids_of_any_size_are_kept(tmp_path: Path, largest: int, kind: str) -> None:
    store = made(tmp_path / "store", [[largest, 7, 8, largest, 7, 9]])
    assert store.tokens.dtype.str == kind
    searched = StoreSearch(store)
    assert chain(searched, *searched.longest([7, 8], 2, 16), 10) == [largest, 7, 9]


def test_of_many_matches_an_even_sample_is_taken(tmp_path: Path) -> None:
    store = made(tmp_path / "store", [[1, 2, 3]] * 90 + [[1, 2, 4]] * 210)
    searched = StoreSearch(store)
    match, places = searched.longest([1, 2], 2, 16)
    assert (match, len(places)) == (2, 300)
    # The first ten in order are all followed by 3; of ten at even distances, three are.
    followers = [int(store.tokens[index]) - 1 for index in searched.behind(match, places, 10)]
    assert Counter(followers) == {3: 3, 4: 7}
    assert [chain(searched, match, places, 10, most) for most in (10, 5000, 1)] == [[4], [4], [3]]


def test_an_open_store_tells_what_it_is_made_of_and_reads_its_files_through_memory_maps(tmp_path: Path) -> None:
    documents = [tokenizer()("The for statement")["input_ids"], []]
    store = made(tmp_path / "new" / "store", documents, tokenizer=tokenizer(), sources=["a.txt"])
    ids = documents[0]
    assert store.header == Header(len(ids), 1, max(ids) + 1, len(tokenizer()), fingerprint(tokenizer()), ("a.txt",))
    assert store.tokens.tolist() == [*(token + 1 for token in ids), END]
    assert isinstance(store.tokens.base, np.memmap)
    assert isinstance(store.suffixes.base, np.memmap)
    assert not store.suffixes.flags.writeable


def test_a_build_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def documents() -> Iterator[list[int]]:
        yield [1, 2, 3]
        assert len(list(tmp_path.iterdir())) == 1  # it grows beside its place
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(tmp_path / "store", documents())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["store.json", "tokens.npy", "suffixes.npy"])
def test_a_store_without_one_of_its_files_does_not_load(tmp_path: Path, missing: str) -> None:
    made(tmp_path / "store", [[1, 2, 3]])
    (tmp_path / "store" / missing).unlink()
    with pytest.raises(ConfigError, match=missing):
        Store.open(tmp_path / "store")


def test_where_something_stands_no_store_is_built(tmp_path: Path) -> None:
    made(tmp_path / "store", [[1, 2, 3]])
    with pytest.raises(OutputError, match="store exists already; remove it, or give the store another name"):
        build_store(tmp_path / "store", [[4]])
    assert Store.open(tmp_path / "store").header.num_tokens == 3
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        build_store(tmp_path / "file" / "store", [[4]])


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_an_empty_corpus_is_refused(tmp_path: Path, documents: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="holds no text"):
        build_store(tmp_path / "store", documents)
    with pytest.raises(ConfigError, match="has the token id -2; ids are 0 or more"):
        build_store(tmp_path / "store", [[3, -2]])
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_store_is_told_with_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: no such folder .*emssd-rest build CORPUS.jsonl"):
        Store.open(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no store.json.*emssd-rest build CORPUS.jsonl"):
        Store.open(tmp_path)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ("", "Expecting value"),
        ("[]", "of another program"),
        ('{"format": "emssd-rest", "version": 2}', "of version 2, and this emssd reads version 1"),
        ('{"format": "emssd-rest", "version": 1, "size": 3}', "has no num_tokens"),
        ({"num_tokens": -1}, "its num_tokens cannot be -1"),
        ({"num_documents": "two"}, 'its num_documents cannot be "two"'),
        ({"sources": 3}, "its sources cannot be 3"),
    ],
)
def test_a_header_that_says_something_else_is_refused(tmp_path: Path, header: Any, complaint: str) -> None:
    made(tmp_path / "store", [[1, 2, 3]])
    file = tmp_path / "store" / "store.json"
    text = header if isinstance(header, str) else json.dumps(json.loads(file.read_text()) | header)
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"store.json cannot be used: .*{complaint}.*build the store anew"):
        Store.open(tmp_path / "store")


@looped(
    "name, values",
    [
        ("tokens.npy", np.ones(101, dtype=np.float64)),
        ("tokens.npy", np.ones(99, dtype=">u2")),
        ("tokens.npy", np.ones(101, dtype=">u2")),
        ("suffixes.npy", np.zeros(101, dtype=np.int32)),
        ("suffixes.npy", np.arange(101, dtype=np.int32)[::-1].copy()),
        ("suffixes.npy", np.arange(101, dtype=np.int32) - 1),
        ("suffixes.npy", np.full(101, 101, dtype=np.int64)),
        ("suffixes.npy", np.array([None] * 101)),
    ],
)
def test_other_arrays_are_refused(tmp_path_factory: pytest.TempPathFactory, name: str, values: Any) -> None:
    folder = tmp_path_factory.mktemp("other") / "store"
    made(folder, [list(range(100))])
    np.save(folder / name, values)
    with pytest.raises(ConfigError, match=r"is damaged: .*build it anew"):
        Store.open(folder)


@pytest.mark.filterwarnings("ignore:Reading")  # of numpy's on a head that looks old
@pytest.mark.parametrize("name", ["store.json", "tokens.npy", "suffixes.npy"])
def test_whatever_byte_is_wrong_a_store_is_refused_with_its_name_or_drafts_within_its_ids(
    tmp_path: Path, name: str
) -> None:
    file = made(tmp_path / "store", [[1, 2, 3, 1, 2], [2, 3, 1]]).path / name
    good = file.read_bytes()
    broken = [good[:index] + bytes([byte]) + good[index + 1 :] for index in range(len(good))
              for byte in (ord("("), good[index] ^ 1)]  # fmt: skip
    rows = Batch((Row(Request("a", (1, 2), 20)), Row(Request("b", (2, 3, 1), 20))))
    refusals = []
    for content in [*broken, *(good[:index] for index in range(0, len(good), 5)), b"PK\3\4" + good]:
        file.write_bytes(content)
        try:
            store = Store.open(tmp_path / "store")
            drafted = RestDrafter(RestConfig(min_match=1), store).propose(rows, [9, 9]).token_ids.tolist()
        except ConfigError as error:
            refusals.append(str(error))
        else:
            assert all(0 <= token < store.header.num_ids for token in drafted)
    assert len(refusals) > len(broken) / 3
    sentence = re.compile(rf"store {tmp_path}/store.*\b{re.escape(name)}\b.*build (it|the store) anew")
    assert [refusal for refusal in refusals if not sentence.fullmatch(refusal)] == []


def test_without_the_package_that_sorts_a_store_is_read_and_none_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "store", [[1, 2, 3]])
    plain_import = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "pydivsufsort":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return plain_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert Store.open(tmp_path / "store").header.num_tokens == 3
    with pytest.raises(ConfigError, match=r"needs the package 'pydivsufsort' .*pip install 'emssd\[rest\]'"):
        build_store(tmp_path / "other", [[1, 2, 3]])
    assert not (tmp_path / "other").exists()
