"""Texts of a corpus: records of JSON lines, or plain text files, and how they become documents of token ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from emssd.data import encode_text, read_texts
from emssd.errors import ConfigError, PromptError

__all__ = ["encoded", "load_tokenizer", "read_corpus"]


def read_corpus(names: Iterable[str], **options: Any) -> list[tuple[str, str]]:
    """`read_texts` of ``field``, ``template`` and ``limit``; errors name the options of this command."""
    try:
        return read_texts(names, **options)
    except PromptError as error:
        said = str(error).partition("; data.chat=")[0]  # documents are no conversations
        raise PromptError(re.sub(r"\bdata\.(field|template)\b(?!\.)", r"--\1", said)) from error


def encoded(texts: Iterable[tuple[str, str]], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of `texts`, as those of a prompt. Raises PromptError: one is no Unicode text."""
    for place, text in texts:
        yield encode_text(text, tokenizer, place)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model's folder or hub id, or of ``demo``. Raises ConfigError: there is none."""
    from emssd.model import load_tokenizer as load

    try:
        return load(name)
    except ConfigError as error:
        raise ConfigError(f"--tokenizer {name}: {error}") from error
