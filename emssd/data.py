"""Prompt sources: the embedded demo, text files, JSONL files and Hugging Face datasets. A plugin like any other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from emssd.errors import ConfigError, PromptError
from emssd.hookspecs import Spec, hookimpl

__all__ = [
    "DatasetConfig",
    "DemoConfig",
    "JSONLConfig",
    "Prompt",
    "SourceConfig",
    "TextConfig",
    "Truncate",
    "Unit",
    "emssd_prompt_sources",
    "truncated",
]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: an id that outputs and errors name it by, and its text."""

    prompt_id: str
    text: str


class Truncate(str, Enum):
    """Which end of a too long prompt is cut off."""

    none = "none"
    left = "left"
    right = "right"


@dataclass
class SourceConfig:
    """Options that every prompt source has.

    Attributes:
        limit: use only this many prompts.
        truncate: shorten prompts of more than `max_prompt_tokens`; ``none`` makes them an error.
        max_prompt_tokens: ``null`` takes what the model's length leaves beside `max_new_tokens`.
    """

    limit: int | None = None
    truncate: Truncate = Truncate.none
    max_prompt_tokens: int | None = None


@dataclass
class DemoConfig(SourceConfig):
    """`data=demo`: passages of Python's own documentation, for `model=demo`."""

    limit: int | None = 32


class Unit(str, Enum):
    """What one prompt is in a text file."""

    line = "line"
    paragraph = "paragraph"
    file = "file"


@dataclass
class TextConfig(SourceConfig):
    """`data=text`: prompts from a text file; empty lines are skipped.

    Attributes:
        path: the file.
        unit: each ``line``, each ``paragraph`` (separated by empty lines), or the whole ``file`` is one prompt.
    """

    path: str = MISSING
    unit: Unit = Unit.line


@dataclass
class JSONLConfig(SourceConfig):
    """`data=jsonl`: one JSON object per line.

    Attributes:
        path: the file.
        field: the prompt's field.
        template: makes the prompt from several fields, as in ``"Question: {question}\\nAnswer:"`` or ``"{turns[0]}"``;
            stands in for `field`.
        id_field: names each prompt; the line number by default.
        where: keep only records with these values, as in ``data.where.category=math``.
    """

    path: str = MISSING
    field: str = "prompt"
    template: str | None = None
    id_field: str | None = None
    where: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass
class DatasetConfig(SourceConfig):
    """`data=hf`: a dataset of the Hugging Face hub, or a local JSONL copy of it.

    Attributes:
        hub: dataset id; needs the extra ``emssd[datasets]``.
        subset, split: which part.
        path: a local JSONL file with the same fields, used in place of the hub.
        field, template, id_field, where: see `JSONLConfig`.
    """

    hub: str | None = None
    subset: str | None = None
    split: str = "test"
    path: str | None = None
    field: str = "prompt"
    template: str | None = None
    id_field: str | None = None
    where: dict[str, str] = dataclasses.field(default_factory=dict)


@hookimpl
def emssd_prompt_sources() -> list[Spec]:
    """Offer the built-in sources."""
    return [
        Spec("demo", DemoConfig, _demo),
        Spec("text", TextConfig, _text),
        Spec("jsonl", JSONLConfig, _jsonl),
        Spec("hf", DatasetConfig, _dataset),
    ]


def truncated(ids: list[int], config: SourceConfig, room: int, name: str) -> list[int]:
    """`ids` of prompt `name` cut to `config.max_prompt_tokens`, or to `room` if that is not set.

    Raises:
        PromptError: too many tokens, and ``truncate`` is ``none``; or there is no room at all.
    """
    limit = room if config.max_prompt_tokens is None else config.max_prompt_tokens
    if config.truncate is Truncate.none:
        if config.max_prompt_tokens is not None and len(ids) > limit:
            raise PromptError(
                f"prompt {name} has {len(ids)} tokens, and data.max_prompt_tokens is {limit}; "
                f"raise it, or cut prompts with data.truncate=left or data.truncate=right"
            )
        return ids
    if limit < 1:
        raise PromptError(
            f"max_new_tokens leaves {limit} tokens for prompts; lower it by {1 - limit} or more"
            if config.max_prompt_tokens is None
            else f"data.max_prompt_tokens is {limit}; it must be at least 1"
        )
    return ids[-limit:] if config.truncate is Truncate.left else ids[:limit]


def _demo(config: DemoConfig) -> list[Prompt]:
    from emssd import demo

    return [Prompt(prompt.prompt_id, prompt.text) for prompt in demo.prompts(config.limit)]


def _text(config: TextConfig) -> list[Prompt]:
    path = _existing(config.path)
    text = _read(path)
    if config.unit is Unit.file:
        pieces = [(1, text)]
    elif config.unit is Unit.line:
        pieces = list(enumerate(text.splitlines(), start=1))
    else:
        pieces = list(enumerate((piece.strip("\n") for piece in text.split("\n\n")), start=1))
    prompts = [Prompt(f"{path.name}:{number}", piece) for number, piece in pieces if piece.strip()]
    if not prompts:
        raise PromptError(f"{path} holds no prompts: it is empty")
    return prompts[: config.limit]


def _jsonl(config: JSONLConfig) -> list[Prompt]:
    return _prompts(_records(_existing(config.path)), config)


def _dataset(config: DatasetConfig) -> list[Prompt]:
    if config.path is not None:
        return _prompts(_records(_existing(config.path)), config)
    if config.hub is None:
        raise ConfigError("data=hf needs data.hub=DATASET (an id of the Hugging Face hub) or data.path=FILE.jsonl")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"reading {config.hub!r} from the hub needs the package 'datasets': pip install 'emssd[datasets]', "
            f"or give a local copy with data.path=FILE.jsonl"
        ) from error
    try:
        rows = datasets.load_dataset(config.hub, config.subset, split=config.split)
    except Exception as error:  # the hub client raises its own and its HTTP library's errors
        raise PromptError(
            f"cannot read dataset {config.hub!r} ({config.subset}, {config.split}): {error}. "
            f"A local copy works with data.path=FILE.jsonl"
        ) from error
    return _prompts(((f"{config.hub}[{i}]", row) for i, row in enumerate(rows)), config)


def _existing(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise PromptError(f"data.path={name}: no such file (looked in {Path.cwd()})")
    return path


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs of place and record; empty lines are skipped."""
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path.name}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptError(
                f"{place} is not JSON: {error.msg} at column {error.colno}; data=jsonl wants one JSON object per line, "
                f"and data=text reads plain text"
            ) from error
        if not isinstance(record, dict):
            raise PromptError(f"{place} is a {type(record).__name__}; data=jsonl wants one JSON object per line")
        yield place, record


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from error


def _prompts(records: Iterable[tuple[str, dict[str, Any]]], config: JSONLConfig | DatasetConfig) -> list[Prompt]:
    def wanted(record: dict[str, Any]) -> bool:
        return all(str(record.get(name)) == value for name, value in config.where.items())

    chosen = ((place, record) for place, record in records if wanted(record))
    prompts = [_prompt(place, record, config) for place, record in islice(chosen, config.limit)]
    if not prompts:
        where = " and ".join(f"{name}={value}" for name, value in config.where.items())
        raise PromptError(f"no prompt has {where}; change data.where" if where else f"{config.path} holds no prompts")
    if len({prompt.prompt_id for prompt in prompts}) < len(prompts):
        raise PromptError(f"data.id_field={config.id_field} gives several prompts the same id; choose another field")
    return prompts


def _prompt(place: str, record: dict[str, Any], config: JSONLConfig | DatasetConfig) -> Prompt:
    has = f"it has {', '.join(map(repr, record))}"
    for name in (config.id_field, config.field if config.template is None else None):
        if name is not None and name not in record:
            raise PromptError(
                f"{place} has no field {name!r}; {has}. Choose with data.field, data.template and data.id_field"
            )
    prompt_id = str(record[config.id_field]) if config.id_field else place
    if config.template is not None:
        return Prompt(prompt_id, _filled(config.template, record, f"{place} does not fit data.template; {has}"))
    text = record[config.field]
    if not isinstance(text, str):
        raise PromptError(
            f"{place}: field {config.field!r} holds a value of type {type(text).__name__}, not text; "
            f"choose another with data.field, or make text of it with \"data.template='{{{config.field}}}'\""
        )
    return Prompt(prompt_id, text)


def _filled(template: str, record: dict[str, Any], complaint: str) -> str:
    try:
        return template.format(**record)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:  # what str.format raises
        raise PromptError(f"{complaint}. {template!r} gives {type(error).__name__}: {error}") from error
