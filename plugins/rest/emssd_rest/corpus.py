"""Texts of a corpus: records of JSON lines, or plain text files, and how they become documents of token ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from emssd.data.prompts import FailedPrompt, encode_text
from emssd.data.records import RecordsConfig, existing_file, read_records, read_text, to_prompts
from emssd.errors import ConfigError, PromptError

__all__ = ["encoded", "load_tokenizer", "read_corpus"]

_PLAIN = "files whose names do not end in .jsonl are read as plain text"


def read_corpus(names: Iterable[str], config: RecordsConfig) -> list[tuple[str, str]]:
    """Place and text of each document: a record of a ``.jsonl`` file, or the whole of any other file.

    Texts of nothing but white space are left out.

    Args:
        config: ``field``, ``template`` and ``limit``, the most records of each file.

    Raises:
        PromptError: a file or a record cannot be read.
    """
    texts: list[tuple[str, str]] = []
    for name in names:
        path = existing_file(name, "")
        texts += _records(path, config) if path.suffix == ".jsonl" else [(path.name, read_text(path))]
    return [(place, text) for place, text in texts if text.strip()]


def encoded(texts: Iterable[tuple[str, str]], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of `texts`, as those of a prompt. Raises PromptError: one is no Unicode text."""
    for place, text in texts:
        yield encode_text(text, tokenizer, place)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model's folder or hub id, or of ``demo``. Raises ConfigError: there is none."""
    from emssd.model import checkpoint

    try:
        return checkpoint.load_tokenizer(name)
    except ConfigError as error:
        raise ConfigError(f"--tokenizer {name}: {error}") from error


def _records(path: Path, config: RecordsConfig) -> list[tuple[str, str]]:
    texts = []
    for prompt in to_prompts(read_records(path, _PLAIN), config, path.name):
        if isinstance(prompt, FailedPrompt):
            said = prompt.error.partition("; data.chat=")[0]  # documents are no conversations
            raise PromptError(re.sub(r"\bdata\.(field|template)\b(?!\.)", r"--\1", said))
        texts.append((prompt.prompt_id, prompt.text))
    return texts
