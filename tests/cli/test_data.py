"""Prompt sources on the command line: files, records, templates, filters, truncation; and what is wrong with a file."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emssd.hooks.registry import Registry
from tests.support.tiers import looped

from .conftest import assert_said

RECORDS: list[dict[str, Any]] = [
    {"prompt": "one", "turns": ["a?", "b?"], "id": "x", "kind": "math", "level": 1},
    {"prompt": "two", "turns": ["c?"], "id": "y", "kind": "code", "level": 2},
    {"prompt": "three", "turns": ["d?"], "id": "z", "kind": "math", "level": 2},
]


@pytest.fixture
def read(emssd: Callable, model: str) -> Callable[..., Any]:
    """``read(*arguments)`` decodes two tokens of each prompt of a source."""
    options = (f"model.path={model}", "max_new_tokens=2", "output_dir=out", "overwrite=true", "progress=false")
    return lambda *arguments: emssd(*options, *arguments)


@pytest.fixture
def records(work: Path) -> Path:
    path = work / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)) + "\n\n")
    return path


def taken(result: Any) -> dict[str, str]:
    assert result.status == 0, result
    return {row["id"]: row["prompt"] for row in result.rows}


@looped(
    "unit, expected",
    [
        ("line", {"t.txt:1": "one", "t.txt:2": "two\u2028still two", "t.txt:4": "three"}),
        ("paragraph", {"t.txt:1": "one\ntwo\u2028still two", "t.txt:2": "three"}),
        ("file", {"t.txt:1": "one\ntwo\u2028still two\n\nthree\n"}),
    ],
)
def test_text_files(unit: str, expected: dict[str, str], read: Callable, work: Path) -> None:
    (work / "t.txt").write_text("one\ntwo\u2028still two\n\nthree\n", encoding="utf-8")
    assert taken(read("data=text", "data.path=t.txt", f"data.unit={unit}")) == expected


@looped("source", ["jsonl", "hf"])
@looped(
    "options, expected",
    [
        ({}, {"records.jsonl:1": "one", "records.jsonl:2": "two", "records.jsonl:3": "three"}),
        ({"field": "kind", "id_field": "id"}, {"x": "math", "y": "code", "z": "math"}),
        ({"template": "Q: {turns[0]}\n{level}", "id_field": "id"}, {"x": "Q: a?\n1", "y": "Q: c?\n2", "z": "Q: d?\n2"}),
        ({"where": {"kind": "math"}, "id_field": "id"}, {"x": "one", "z": "three"}),
        ({"where": {"kind": "math", "level": "2"}, "id_field": "id"}, {"z": "three"}),
        ({"limit": 1}, {"records.jsonl:1": "one"}),
        ({"where": {"kind": "math"}, "limit": 1, "id_field": "id"}, {"x": "one"}),
    ],
)
def test_records(source: str, options: dict[str, Any], expected: dict[str, str], records: Path) -> None:
    registry = Registry()
    spec, config = registry.resolve("data", source)
    prompts = registry.build("data", spec, dataclasses.replace(config, path=str(records), **options))
    assert {prompt.prompt_id: prompt.text for prompt in prompts} == expected


def test_spec_bench_from_its_real_file(read: Callable, shared: Path) -> None:
    path = shared / "data" / "spec_bench_half.jsonl"
    wanted = [record for record in map(json.loads, path.read_text().splitlines()) if record["category"] == "math"][:3]
    result = read(
        "data=spec_bench", f"data.path={path}", "data.where.category=math", "data.limit=3", "data.truncate=right"
    )
    assert taken(result) == {str(record["question_id"]): record["turns"][0] for record in wanted}


@looped("source", ["text", "jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_prompt(source: str, read: Callable, work: Path) -> None:
    content = {"text": "one\n", "jsonl": '{"prompt": "one"}\n'}[source]
    (work / "t").write_bytes(content.encode("utf-8-sig"))
    assert taken(read(f"data={source}", "data.path=t")) == {"t:1": "one"}


@looped("truncate, kept", [("left", "fghij"), ("right", "abcde")])
def test_truncation_keeps_one_end(truncate: str, kept: str, read: Callable, work: Path) -> None:
    (work / "t.txt").write_text(f"abcdefghij\n{kept}\n")
    result = read("data=text", "data.path=t.txt", f"data.truncate={truncate}", "data.max_prompt_tokens=5")
    cut, whole = sorted(result.rows, key=lambda row: row["id"])
    assert (cut["num_prompt_tokens"], whole["num_prompt_tokens"]) == (5, 5)
    assert cut["token_ids"] == whole["token_ids"]
    (work / "t.txt").write_text("x" * 300)
    result = read("data=text", "data.path=t.txt", f"data.truncate={truncate}", "max_new_tokens=10")
    assert result.rows[0]["num_prompt_tokens"] == 86  # of the model's 96


BAD = {  # what is wrong with single records, test_bad_prompts.py has
    ("", "data=text"): "no/file holds no prompts: it is empty",
    (b"caf\xe9", "data=text"): "no/file is not UTF-8 text (unexpected end of data at byte 3); convert it",
    ("x" * 300, "data=text"): "prompt file:1 has 300 tokens, and the model takes 96 with at least one new one; shorten "
        "it or truncate prompts to 95 tokens or fewer (data.max_prompt_tokens)",
    ("x" * 30, "data=text data.max_prompt_tokens=20"): "prompt file:1 has 30 tokens, and data.max_prompt_tokens is 20; "
        "raise it, or cut prompts with data.truncate=left or data.truncate=right",
    ("abc", "data=text data.truncate=left max_new_tokens=100"):
        "max_new_tokens leaves -4 tokens for prompts; lower it by 5 or more",
    ("{oops", "data=jsonl"): "file:1 is not JSON: Expecting property name enclosed in double quotes at column 2; "
        "each line must be one JSON object, and data=text reads plain text",
    ('{"prompt": 7}', "data=jsonl"): "file:1: field 'prompt' holds a value of type int, not text; choose another with "
        "data.field, or make text of it with \"data.template='{prompt}'\"",
    ('{"turns": ["a"]}', "data=jsonl data.template='{turns[1]}'"): "file:1 does not fit data.template; it has 'turns'. "
        "'{turns[1]}' gives IndexError: list index out of range",
    ('{"turns": ["a"]}', "data=jsonl data.template='{turns'"): "file:1 does not fit data.template; it has 'turns'. "
        "'{turns' gives ValueError: expected '}' before end of string",
    ('{"prompt": "a", "k": 1}', "data=jsonl data.where.k=2"): "no prompt has k=2; change data.where",
    ("", "data=text data.path=."): "data.path=. is a folder; give a file in it",
    ("", "data=text data.path=missing.txt"): "data.path=missing.txt: no such file (looked in …",
    ("", "data=hf data.path=null"):
        "data=hf needs data.hub=DATASET (an id of the Hugging Face hub) or data.path=FILE.jsonl",
}  # fmt: skip


@looped("case", BAD, at_a_time=7)
def test_a_bad_file_is_named_with_the_place(case: tuple[str | bytes, str], read: Callable, work: Path) -> None:
    content, arguments = case
    (work / "no").mkdir(exist_ok=True)
    (work / "no" / "file").write_bytes(content if isinstance(content, bytes) else content.encode())
    named = {name: value for name, _, value in (word.partition("=") for word in arguments.split(" "))}
    options = {"data.path": "no/file"} | named
    assert_said(read(*(f"{name}={value}" for name, value in options.items())).sentence, BAD[case])


def test_the_hub_needs_its_client(read: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert read("data=gsm8k").sentence == (
        "reading 'openai/gsm8k' from the hub needs the package 'datasets': pip install 'emssd[datasets]', "
        "or give a local copy with data.path=FILE.jsonl"
    )


def test_a_dataset_of_the_hub(read: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client stands in for itself: what it is asked for, and what becomes of its rows and its errors."""
    calls = []

    def load_dataset(name: str, subset: str | None, split: str) -> Iterable[dict[str, str]]:
        calls.append((name, subset, split))
        if name == "nobody/nothing":
            raise ConnectionError("no route")
        if name == "torn":
            return ({"question": "1+1?"} if i == 0 else {}[i] for i in range(2))
        return [{"question": "1+1?"}, {"question": "2+2?"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert taken(read("data=gsm8k", "data.limit=1")) == {"openai/gsm8k[0]": "Question: 1+1?\nAnswer:"}
    assert calls == [("openai/gsm8k", "main", "test")]
    assert read("data=hf", "data.hub=nobody/nothing").sentence == (
        "cannot read dataset 'nobody/nothing' (None, test): no route. A local copy works with data.path=FILE.jsonl"
    )
    torn = ("data=hf", "data.hub=torn", "data.field=question")
    assert read(*torn).sentence == (
        "cannot read dataset 'torn' (None, test): 1. A local copy works with data.path=FILE.jsonl"
    )
    assert taken(read(*torn, "data.limit=1")) == {"torn[0]": "1+1?"}


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """``type_in(content)`` is what comes by standard input."""
    return lambda content: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_prompts_from_standard_input(read: Callable, type_in: Callable[[bytes], None]) -> None:
    type_in("one\r\n\nthree é\n".encode())
    assert taken(read("data=text", "data.path=-")) == {"stdin:1": "one", "stdin:3": "three é"}
    type_in(b'{"prompt": "one", "id": "x"}\n\n{"prompt": "two", "id": "y"}')
    assert taken(read("data=jsonl", "data.path=-", "data.id_field=id")) == {"x": "one", "y": "two"}
    type_in(b'{"prompt": "one"}')
    assert taken(read("data=jsonl", "data.path=-")) == {"stdin:1": "one"}


def test_a_prompt_of_the_command_line_is_decoded_and_its_text_printed(read: Callable, prompts: Path) -> None:
    result = read("prompt=Hello, world: {x}", "max_new_tokens=12")
    (row,) = result.rows
    assert (row["id"], row["prompt"]) == ("0", "Hello, world: {x}")
    assert len(row["token_ids"]) > 4
    assert result.out == f"{row['text']}\n"
    prompts.write_text("Hello, world: {x}\n")
    (same,) = read("data=text", f"data.path={prompts}", "max_new_tokens=12").rows
    assert same["token_ids"] == row["token_ids"]
    again = read("prompt=another", "max_new_tokens=12", "overwrite=false", "resume=true").sentence
    assert again.startswith("resume=true: the rows in out were made with another value of prompt, data.")


def test_a_prompt_goes_into_the_chat_template(read: Callable, chat_model: str) -> None:
    result = read(f"model.path={chat_model}", "prompt=hi", "data.chat=true")
    assert result.rows[0]["num_prompt_tokens"] == len("s[u]hi[a]")
    assert read("prompt=").sentence == "prompt 0 is empty; there is nothing to continue"
