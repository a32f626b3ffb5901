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

__all__ = ["Record", "RecordsConfig", "content_of", "records_in", "text_in", "to_prompts"]

Record = tuple[str, dict[str, Any]]
"""Its place, by which errors name it, and its fields."""

_PLAIN = "data=text reads plain text"


@dataclass
class RecordsConfig(SourceConfig):
    """Options of sources whose prompts are records with fields.

    Attributes:
        field: the prompt's field; with `chat`, it may hold a list of messages.
        template: makes the prompt from several fields, as in ``"Question: {question}\\nAnswer:"`` or ``"{turns[0]}"``;
            stands in for `field`. ``\\n``, ``\\t``, ``\\r`` and ``\\\\`` stand for newline, tab, carriage return and
            backslash.
        id_field: names each prompt; its place in the file or dataset by default.
        max_new_tokens_field: holds a prompt's own limit of new tokens; where it is ``null``, the run's holds.
        sampling_field: holds a prompt's own options of `sampling`, as in ``{"temperature": 0.7, "n": 4}``; for those
            that it leaves out or that are ``null``, and where it is ``null`` itself, the run's hold.
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
        place = f"{Path(name).name}:{number}"
        try:
            record = read_json(line.decode("utf-8"))
        except json.JSONDecodeError as error:
            where = f"{error.msg} at column {error.colno}"
            yield FailedPrompt(place, f"{place} is not JSON: {where}; each line must be one JSON object, and {plain}")
        except UnicodeDecodeError as error:
            yield FailedPrompt(place, f"{place} is not UTF-8 text ({error.reason} at byte {error.start}); convert it")
        except ValueError as error:
            yield FailedPrompt(place, f"{place} is JSON that cannot be read: {error}; repair what wrote it")
        else:
            if isinstance(record, dict):
                yield place, record
            else:
                kind = type(record).__name__
                yield FailedPrompt(place, f"{place} is a {kind}; each line must be one JSON object")


def to_prompts(
    records: Iterable[Record | FailedPrompt], config: RecordsConfig, origin: str
) -> list[Prompt | FailedPrompt]:
    """The prompts of `records`, which come from `origin`, and what is wrong with the others.

    A record that cannot be read counts towards ``limit``, and no ``where`` leaves it out.
    """
    prompts: list[Prompt | FailedPrompt] = []
    taken: dict[str, str] = {}  # the place of each id
    for item in islice((item for item in records if _is_wanted(item, config.where)), config.limit):
        if isinstance(item, FailedPrompt):
            prompts.append(item)
            continue
        place, record = item
        try:
            prompt = _prompt(place, record, config)
            if prompt.prompt_id in taken:
                raise PromptError(
                    f"{place} has the id {prompt.prompt_id!r} of {taken[prompt.prompt_id]}; choose a field that "
                    f"differs with data.id_field"
                )
        except PromptError as error:
            prompts.append(FailedPrompt(place, str(error)))
        else:
            taken[prompt.prompt_id] = place
            prompts.append(prompt)
    if not prompts:
        where = " and ".join(f"{name}={value}" for name, value in config.where.items())
        raise PromptError(f"no prompt has {where}; change data.where" if where else f"{origin} holds no prompts")
    return prompts


def _is_wanted(item: Record | FailedPrompt, where: Mapping[str, str]) -> bool:
    try:
        return isinstance(item, FailedPrompt) or all(str(item[1].get(name)) == value for name, value in where.items())
    except RecursionError:  # lists in lists in lists; nobody asks for them
        return False


def _prompt(place: str, record: dict[str, Any], config: RecordsConfig) -> Prompt:
    has = f"it has {', '.join(map(repr, record))}"
    names = {option: getattr(config, option) for option in ("id_field", "max_new_tokens_field", "sampling_field")}
    if config.template is None:
        names["field"] = config.field
    for option, name in names.items():
        if name is not None and name not in record:
            choice = " or data.template" if option == "field" else ""
            raise PromptError(f"{place} has no field {name!r}; {has}. Choose with data.{option}{choice}")
    prompt = Prompt(
        _id(place, record, config.id_field) if config.id_field else place,
        max_new_tokens=_limit(place, record, config.max_new_tokens_field),
        sampling=_sampling(place, record, config.sampling_field),
    )
    if config.template is not None:
        text = _filled(config.template, record, f"{place} does not fit data.template; {has}")
        return replace(prompt, text=text)
    value = record[config.field]
    if config.chat and isinstance(value, list):
        return replace(prompt, messages=tuple(check_messages(value, place)))
    if not isinstance(value, str):
        raise PromptError(
            f"{_holds(place, config.field, value)}, not text; choose another with data.field, or make text of it with "
            f"\"data.template='{{{config.field}}}'\""
            + ("; data.chat=true takes a list of messages" if isinstance(value, list) else "")
        )
    return replace(prompt, text=value)


def _holds(place: str, name: str | None, value: object) -> str:
    return f"{place}: field {name!r} holds a value of type {type(value).__name__}"


def _id(place: str, record: dict[str, Any], name: str) -> str:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise PromptError(f"{_holds(place, name, value)}; an id is a text or a number")
    return str(value)


def _limit(place: str, record: dict[str, Any], name: str | None) -> int | None:
    limit = None if name is None else record[name]
    if isinstance(limit, float) and limit.is_integer():  # what tables make of whole numbers where some are missing
        limit = int(limit)
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise PromptError(
            f"{place}: field {name!r} holds {limit!r}; a limit of new tokens is a whole number of at least 1, or null"
        )
    return limit


def _sampling(place: str, record: dict[str, Any], name: str | None) -> dict[str, Any] | None:
    options = None if name is None else record[name]
    if options is not None and not isinstance(options, dict):
        example = '{"temperature": 0.7}'
        raise PromptError(
            f"{_holds(place, name, options)}; options of sampling are an object, such as {example}, or null"
        )
    return options


def _filled(template: str, record: dict[str, Any], complaint: str) -> str:
    try:
        return unescaped(template).format(**record)
    except (LookupError, AttributeError, TypeError, ValueError, RecursionError) as error:  # what str.format raises
        raise PromptError(f"{complaint}. {template!r} gives {type(error).__name__}: {error}") from error


def read_texts(
    names: Iterable[str], *, field: str = "text", template: str | None = None, limit: int | None = None
) -> list[tuple[str, str]]:
    """Place and text of each document: a record of a ``.jsonl`` file, or the whole of any other file.

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
    return [(place, text) for place, text in texts if text.strip()]
