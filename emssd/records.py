"""Prompts from records: JSON lines of a local file, or rows of a dataset, by field or by template."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from emssd.errors import PromptError
from emssd.prompts import Prompt, SourceConfig

__all__ = ["RecordsConfig", "existing_file", "read_records", "read_text", "to_prompts"]


@dataclass
class RecordsConfig(SourceConfig):
    """Options of sources whose prompts are records with fields.

    Attributes:
        field: the prompt's field.
        template: makes the prompt from several fields, as in ``"Question: {question}\\nAnswer:"`` or ``"{turns[0]}"``;
            stands in for `field`.
        id_field: names each prompt; its place in the file or dataset by default.
        where: keep only records with these values, as in ``data.where.category=math``.
    """

    field: str = "prompt"
    template: str | None = None
    id_field: str | None = None
    where: dict[str, str] = dataclasses.field(default_factory=dict)


def existing_file(name: str) -> Path:
    """The file that ``data.path`` names.

    Raises:
        PromptError: there is none.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        raise PromptError(f"data.path={name}: no such file (looked in {Path.cwd()})")
    return path


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs of place and record of a JSONL file; empty lines are skipped.

    Raises:
        PromptError: a line that is no JSON object, with its number.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
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


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        PromptError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from error


def to_prompts(records: Iterable[tuple[str, dict[str, Any]]], config: RecordsConfig, origin: str) -> list[Prompt]:
    """The prompts of pairs of place and record, which come from `origin`.

    Raises:
        PromptError: a field is missing or holds no text, ids repeat, or nothing is left.
    """

    def wanted(record: dict[str, Any]) -> bool:
        return all(str(record.get(name)) == value for name, value in config.where.items())

    chosen = ((place, record) for place, record in records if wanted(record))
    prompts = [_prompt(place, record, config) for place, record in islice(chosen, config.limit)]
    if not prompts:
        where = " and ".join(f"{name}={value}" for name, value in config.where.items())
        raise PromptError(f"no prompt has {where}; change data.where" if where else f"{origin} holds no prompts")
    if len({prompt.prompt_id for prompt in prompts}) < len(prompts):
        raise PromptError(f"data.id_field={config.id_field} gives several prompts the same id; choose another field")
    return prompts


def _prompt(place: str, record: dict[str, Any], config: RecordsConfig) -> Prompt:
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
