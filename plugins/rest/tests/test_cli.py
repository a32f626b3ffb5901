"""``emssd-rest``: what it makes of files, what it prints, and what it refuses with a sentence and status 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from emssd_rest.cli import load_tokenizer, main
from emssd_rest.store import Store

RECORDS = [
    {"text": "The for statement is used to iterate.", "answer": "yes"},
    {"text": "  ", "answer": "blank"},
    {"text": "Lambda expressions are sometimes useful.", "answer": "no"},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def build(*arguments: object) -> None:
    main(["build", *map(str, arguments), "--tokenizer", "demo"])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The sentence that a call ends with."""
    with pytest.raises(SystemExit) as leaving:
        main([*map(str, arguments)])
    assert leaving.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("emssd-rest: error: ")
    return message


def documents(store: Path) -> list[str]:
    """The texts in a store, without special tokens."""
    tokenizer, texts, ids = load_tokenizer("demo"), [], list[int]()
    for token in Store.open(store).tokens.tolist():
        if token:
            ids.append(token - 1)
        else:
            texts.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
            ids = []
    return texts


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ([], [RECORDS[0]["text"], RECORDS[2]["text"]]),
        (["--field", "answer"], ["yes", "blank", "no"]),
        (["--limit", "1"], [RECORDS[0]["text"]]),
        (["--template", r"{answer}\n{text}", "--limit", "1"], [f"yes\n{RECORDS[0]['text']}"]),
    ],
)
def test_records_become_documents(tmp_path: Path, corpus: Path, options: list[str], texts: list[str]) -> None:
    build(corpus, tmp_path / "store", *options)
    assert documents(tmp_path / "store") == texts


def test_other_files_are_one_document_each_and_several_make_one_store(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "book.txt").write_text("One line.\n\nAnother one.\n")
    build(corpus, tmp_path / "book.txt", tmp_path / "store")
    assert documents(tmp_path / "store")[2:] == ["One line.\n\nAnother one."]
    header = Store.open(tmp_path / "store").header
    made = capsys.readouterr().out
    assert f"3 documents, {header.num_tokens} tokens. Use it with drafter=rest drafter.store=" in made
    main(["info", str(tmp_path / "store")])
    printed = capsys.readouterr().out
    for fact in (f"tokens     {header.num_tokens}", "corpus.jsonl, book.txt", header.tokenizer[:12]):
        assert fact in printed


def test_what_cannot_be_read_is_told_in_the_words_of_this_command(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.jsonl").write_text('{"text": 3}\n{"text"\n')
    (tmp_path / "lists.jsonl").write_text('{"text": ["one", "two"]}\n')
    (tmp_path / "array.jsonl").write_text("[]\n")
    (tmp_path / "latin.txt").write_bytes("Götter".encode("latin-1"))
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "empty.txt").write_text("  \n")
    for arguments, sentence in (
        (["nowhere.jsonl"], "error: nowhere.jsonl: no such file"),
        (["my prompts, data.field.jsonl"], "error: my prompts, data.field.jsonl: no such file"),  # the user's own words
        ([corpus, "--field", "prompt"], "has no field 'prompt'; it has 'text', 'answer'. Choose with --field or"),
        ([corpus, "--template", "{prompt}"], "corpus.jsonl:1 does not fit --template"),
        ([tmp_path / "broken.jsonl"], "holds a value of type int, not text; choose another with --field"),
        ([tmp_path / "broken.jsonl"], "or make text of it with \"--template='{text}'\""),
        ([tmp_path / "broken.jsonl", "--template", "{text}"], "broken.jsonl:2 is not JSON"),
        (
            [tmp_path / "broken.jsonl", "--template", "{text}"],
            ", and files whose names do not end in .jsonl are read as plain text",
        ),
        ([tmp_path / "lists.jsonl"], "holds a value of type list, not text; choose another with --field"),
        ([tmp_path / "array.jsonl"], "array.jsonl:1 is a list; each line must be one JSON object"),
        ([tmp_path / "latin.txt"], "is not UTF-8 text"),
        ([tmp_path / "empty.jsonl"], "empty.jsonl holds no prompts"),
        ([tmp_path / "empty.txt"], "the corpus holds no text"),
        ([corpus, "--limit", "0"], "--limit is 0; it must be at least 1"),
    ):
        file, *options = arguments
        message = refused(capsys, "build", file, tmp_path / "store", *options, "--tokenizer", "demo")
        assert sentence in message
        assert "data." not in message.replace(str(file), "")
        assert "data=" not in message
        assert not (tmp_path / "store").exists()


def test_a_tokenizer_that_is_not_there_is_told(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, "build", corpus, tmp_path / "store", "--tokenizer", "/nowhere")
    assert "--tokenizer /nowhere: cannot load the model '/nowhere': there is no such folder" in message
    message = refused(capsys, "build", corpus, tmp_path / "store", "--tokenizer", tmp_path)
    assert "its tokenizer is missing: neither tokenizer.json nor" in message


def test_info_of_no_store_and_a_store_that_is_in_the_way_are_told(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no store.json" in refused(capsys, "info", tmp_path)
    assert "exists already" in refused(capsys, "build", corpus, tmp_path, "--tokenizer", "demo")
