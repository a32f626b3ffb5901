"""Prompts from records: JSON lines of a local file, or rows of a dataset, by field or by template."""

from __future__ import annotations

import codecs
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from emssd.data.chat import check_messages
from emssd.data.prompts import FailedPrompt, Prompt, SourceConfig, unescaped
from emssd.data.typed import read_json
from emssd.errors import PromptError

__all__ = ["Record", "RecordsConfig", "content_of", "records_in", "records_of", "text_in", "to_prompts"]

Record = tuple[str, dict[str, Any]]
"""Its name in errors, and its fields."""

_PLAIN = "data=text reads plain text"


@dataclass
class RecordsConfig(SourceConfig):
    """Options of sources whose prompts are records with fields.

    Attributes:
        field: the prompt's field; with `chat`, it may hold a list of messages.
        template: makes the prompt from several fields, as in ``"Question: {question}\\nAnswer:"`` or ``"{turns[0]}"``;
            stands in for `field`. ``\\n``, ``\\t``, ``\\r`` and ``\\\\`` stand for newline, tab, carriage return and
            backslash.
        id_field: names each prompt; the default is its line in the file or its number in the dataset.
        max_new_tokens_field: holds a prompt's own limit of new tokens; where it is ``null``, the run's holds.
        sampling_field: holds a prompt's own options of `sampling`, as in ``{"temperature": 0.7, "n": 4}``; the run's
            hold for an option that is left out or ``null``.
        where: keep only records with these values, as in ``data.where.category=math``.
    """

    field: str = "prompt"
    template: str | None = None
    id_field: str | None = None
    max_new_tokens_field: str | None = None
    sampling_field: str | None = None
    where: dict[str, str] = dataclasses.field(default_factory=dict)


def content_of(path: str, option: str = "data.path=") -> tuple[str, bytes]:
    """Name of the file at `path`, as errors have it, and its content; ``-`` is standard input."""
    if path == "-":
        return "stdin", sys.stdin.buffer.read()
    file = Path(path).expanduser()
    if file.is_dir():
        raise PromptError(f"{option}{path} is a folder; give a file in it")
    if not file.is_file():
        raise PromptError(f"{option}{path}: no such file (looked in {Path.cwd()})")
    try:
        return path, file.read_bytes()
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from error


def text_in(name: str, content: bytes) -> str:
    """The text in the content of a file, without the byte order mark that some editors begin it with."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def records_in(name: str, content: bytes, plain: str = _PLAIN) -> Iterator[Record | FailedPrompt]:
    """The records in the content of a JSONL file, or what is wrong with a line; empty lines are skipped.

    In an error, `plain` tells how to read plain text.
    """
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        record_id = f"{Path(name).name}:{number}"
        try:
            record = read_json(line.decode("utf-8"))
        except json.JSONDecodeError as error:
            complaint = (
                f"is not JSON: {error.msg} at column {error.colno}; each line must be one JSON object, and {plain}"
            )
        except UnicodeDecodeError as error:
            complaint = f"is not UTF-8 text ({error.reason} at byte {error.start}); convert it"
        except ValueError as error:
            complaint = f"is JSON that cannot be read: {error}; repair what wrote it"
        else:
            if isinstance(record, dict):
                yield record_id, record
                continue
            complaint = f"is a {type(record).__name__}; each line must be one JSON object"
        yield FailedPrompt(record_id, f"{record_id} {complaint}")


def records_of(path: str, config: RecordsConfig) -> list[Prompt | FailedPrompt]:
    """The prompts of a JSONL file; see `to_prompts`."""
    name, content = content_of(path)
    return to_prompts(records_in(name, content), config, name)


def to_prompts(
    records: Iterable[Record | FailedPrompt], config: RecordsConfig, origin: str
) -> list[Prompt | FailedPrompt]:
    """The prompts of `records`, which come from `origin`, and a `FailedPrompt` for each record that gives none.

    A record that cannot be read counts towards ``limit``, and no ``where`` leaves it out.
    """
    prompts: list[Prompt | FailedPrompt] = []
    taken: dict[str, str] = {}  # by the id of a prompt, its record
    for item in islice((item for item in records if _is_wanted(item, config.where)), config.limit):
        if isinstance(item, FailedPrompt):
            prompts.append(item)
            continue
        name, record = item
        try:
            prompt = _prompt(name, record, config)
            if (first := taken.setdefault(prompt.prompt_id, name)) != name:
                raise PromptError(
                    f"{name} has the id {prompt.prompt_id!r} of {first}; choose a field that differs with data.id_field"
                )
            prompts.append(prompt)
        except PromptError as error:
            prompts.append(FailedPrompt(name, str(error)))
    if not prompts:
        where = " and ".join(f"{name}={value}" for name, value in config.where.items())
        raise PromptError(f"no prompt has {where}; change data.where" if where else f"{origin} holds no prompts")
    return prompts


def _is_wanted(item: Record | FailedPrompt, where: Mapping[str, str]) -> bool:
    try:
        return isinstance(item, FailedPrompt) or all(str(item[1].get(name)) == value for name, value in where.items())
    except RecursionError:  # lists in lists in lists; nobody asks for them
        return False


def _prompt(name: str, record: dict[str, Any], config: RecordsConfig) -> Prompt:
    """The prompt of the record that errors call `name`."""
    has = f"it has {', '.join(map(repr, record))}"
    fields = {option: getattr(config, option) for option in ("id_field", "max_new_tokens_field", "sampling_field")}
    if config.template is None:
        fields["field"] = config.field
    for option, field in fields.items():
        if field is not None and field not in record:
            choice = " or data.template" if option == "field" else ""
            raise PromptError(f"{name} has no field {field!r}; {has}. Choose with data.{option}{choice}")
    prompt_id, limit, sampling = (None if field is None else record[field] for field in [*fields.values()][:3])
    if config.id_field and (isinstance(prompt_id, bool) or not isinstance(prompt_id, str | int | float)):
        raise PromptError(f"{_holds(name, config.id_field, prompt_id)}; an id is a text or a number")
    if isinstance(limit, float) and limit.is_integer():  # what tables make of whole numbers where some are missing
        limit = int(limit)
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise PromptError(
            f"{name}: field {config.max_new_tokens_field!r} holds {limit!r}; a limit of new tokens is a whole number "
            f"of at least 1, or null"
        )
    if not isinstance(sampling, dict | None):
        raise PromptError(
            f"{_holds(name, config.sampling_field, sampling)}; options of sampling are an object, such as "
            f'{{"temperature": 0.7}}, or null'
        )
    prompt = Prompt(name if prompt_id is None else str(prompt_id), max_new_tokens=limit, sampling=sampling)
    if config.template is None:
        return _with_text(prompt, name, record[config.field], config)
    try:
        return replace(prompt, text=unescaped(config.template).format(**record))
    except (LookupError, AttributeError, TypeError, ValueError, RecursionError) as error:  # what str.format raises
        reason = f"{config.template!r} gives {type(error).__name__}: {error}"
        raise PromptError(f"{name} does not fit data.template; {has}. {reason}") from error


def _with_text(prompt: Prompt, name: str, value: object, config: RecordsConfig) -> Prompt:
    """`prompt` with the text or the messages of its field."""
    if config.chat and isinstance(value, list):
        return replace(prompt, messages=tuple(check_messages(value, name)))
    if isinstance(value, str):
        return replace(prompt, text=value)
    raise PromptError(
        f"{_holds(name, config.field, value)}, not text; choose another with data.field, or make text of it with "
        f"\"data.template='{{{config.field}}}'\""
        + ("; data.chat=true takes a list of messages" if isinstance(value, list) else "")
    )


def _holds(name: str, field: str | None, value: object) -> str:
    return f"{name}: field {field!r} holds a value of type {type(value).__name__}"


def read_texts(
    names: Iterable[str], *, field: str = "text", template: str | None = None, limit: int | None = None
) -> list[tuple[str, str]]:
    """Name and text of each document: a record of a ``.jsonl`` file, or the whole of any other file.

    Texts of nothing but white space are left out. Raises PromptError: a file or a record cannot be read.

    Args:
        names: of the files.
        field, template, limit: see `RecordsConfig`; `limit` is of each file.
    """
    config, texts = RecordsConfig(field=field, template=template, limit=limit), list[tuple[str, str]]()
    for path in names:
        name, content = content_of(path, "")
        if not name.endswith(".jsonl"):
            texts.append((Path(name).name, text_in(name, content)))
            continue
        plain = "files whose names do not end in .jsonl are read as plain text"
        for prompt in to_prompts(records_in(name, content, plain), config, Path(name).name):
            if isinstance(prompt, FailedPrompt):
                raise PromptError(prompt.error)
            texts.append((prompt.prompt_id, prompt.text))
    return [(name, text) for name, text in texts if text.strip()]
