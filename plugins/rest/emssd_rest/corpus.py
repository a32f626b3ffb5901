"""Texts of a corpus: records of JSON lines, or plain text files, and how they become documents of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from emssd.errors import ConfigError, PromptError
from emssd.prompts import FailedPrompt, encode_text
from emssd.records import RecordsConfig, existing_file, read_records, read_text, to_prompts

__all__ = ["encoded", "load_tokenizer", "read_corpus"]

# The readers of prompts speak of the options of `python -m emssd`.
_OUR_WORDS = {
    "data.path=": "",
    "data.field or data.template": "--field or --template",
    "data.field": "--field",
    "data.template=": "--template ",
    "data.template": "--template",
    "data=jsonl wants": "a .jsonl file has",
    ", and data=text reads plain text": "; files of other names are read as plain text",
    "prompts": "documents",
}


def read_corpus(names: Iterable[str], config: RecordsConfig) -> list[tuple[str, str]]:
    """Place and text of each document: a record of a ``.jsonl`` file, or the whole of any other file.

    Texts of nothing but white space are left out.

    Args:
        names: the files.
        config: ``field``, ``template`` and ``limit``, the most records of each file.

    Raises:
        PromptError: a file or a record cannot be read.
    """
    texts: list[tuple[str, str]] = []
    try:
        for name in names:
            path = existing_file(name)
            texts += _records(path, config) if path.suffix == ".jsonl" else [(path.name, read_text(path))]
    except PromptError as error:
        raise PromptError(_in_our_words(str(error))) from error
    return [(place, text) for place, text in texts if text.strip()]


def encoded(texts: Iterable[tuple[str, str]], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of `texts`, as those of a prompt.

    Raises:
        PromptError: one is no Unicode text.
    """
    for place, text in texts:
        yield encode_text(text, tokenizer, place)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model's folder or hub id, or of ``demo``.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoTokenizer

    from emssd.demo import model_path

    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        raise ConfigError(f"--tokenizer {name}: no such folder")
    source = str(model_path("target")) if name == "demo" else str(Path(name).expanduser())
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"--tokenizer {name}: no tokenizer that Transformers can load ({reason}); give a model's folder or hub id"
        ) from error


def _records(path: Path, config: RecordsConfig) -> list[tuple[str, str]]:
    texts = []
    for prompt in to_prompts(read_records(path), config, path.name):
        if isinstance(prompt, FailedPrompt):
            raise PromptError(prompt.error)
        texts.append((prompt.prompt_id, prompt.text))
    return texts


def _in_our_words(message: str) -> str:
    for theirs, ours in _OUR_WORDS.items():
        message = message.replace(theirs, ours)
    return message
