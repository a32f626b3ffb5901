"""Prompt sources: the embedded demo, files, Hugging Face datasets, random tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

from emssd.data.prompts import FailedPrompt, Prompt, SourceConfig
from emssd.data.records import Record, RecordsConfig, content_of, records_of, text_in, to_prompts
from emssd.errors import ConfigError, PromptError
from emssd.errors.ranges import AtLeastOne, Meta

__all__ = [
    "DatasetConfig",
    "DemoConfig",
    "FileConfig",
    "JSONLConfig",
    "RandomConfig",
    "TextConfig",
    "dataset_prompts",
    "demo_prompts",
    "random_prompts",
    "text_prompts",
]


@dataclass
class DemoConfig(SourceConfig):
    """`data=demo`: passages of Python's own documentation, for `model=demo`.

    Attributes:
        kind: only prompts that ask to ``restate`` a passage, or only those that ask to ``continue`` one.
    """

    limit: AtLeastOne | None = 32
    kind: str | None = None


class Unit(str, Enum):
    """The unit of a text file that is one prompt."""

    line = "line"
    paragraph = "paragraph"
    file = "file"


@dataclass
class FileConfig:
    """Options of a source that reads one file.

    Attributes:
        path: the file; ``-`` is standard input.
    """

    path: str = "???"  # OmegaConf's mark of what must be given


@dataclass
class TextConfig(SourceConfig, FileConfig):
    """`data=text`: prompts from a text file; empty lines are skipped.

    Attributes:
        unit: each ``line``, each ``paragraph`` (separated by empty lines), or the whole ``file`` is one prompt.
    """

    unit: Unit = Unit.line


@dataclass
class JSONLConfig(RecordsConfig, FileConfig):
    """`data=jsonl`: one JSON object per line."""


@dataclass
class DatasetConfig(RecordsConfig):
    """`data=hf`: a dataset of the Hugging Face hub, or a local JSONL copy of it.

    Attributes:
        hub: dataset id; needs the extra ``emssd[datasets]``.
        subset, split: which part.
        path: a local JSONL file with the same fields, used in place of the hub.
    """

    hub: str | None = None
    subset: str | None = None
    split: str = "test"
    path: str | None = None


@dataclass
class RandomConfig(SourceConfig):
    """`data=random`: prompts of random tokens, for timing.

    Attributes:
        num_tokens: of each prompt.
        vocab_size: token ids are drawn below this, and at least 4, since models keep special tokens there.
    """

    limit: AtLeastOne | None = 32
    num_tokens: AtLeastOne = 128
    vocab_size: Annotated[int, Meta(ge=5)] = 1000


def demo_prompts(config: DemoConfig) -> list[Prompt]:
    """The prompts of `data=demo`."""
    from emssd.data import demo

    prompts = [(prompt, prompt.prompt_id.rpartition("-")[2]) for prompt in demo.prompts()]
    kinds = sorted({kind for _, kind in prompts})
    if config.kind not in (None, *kinds):
        raise ConfigError(f"data.kind is {config.kind!r}; the demo has prompts of the kinds {', '.join(kinds)}")
    return [prompt for prompt, kind in prompts if config.kind in (None, kind)][: config.limit]


def random_prompts(config: RandomConfig) -> list[Prompt]:
    """The prompts of `data=random`."""
    if config.limit is None:
        raise ConfigError("data.limit says how many random prompts to make, and is null; give a number")
    draw = random.Random(0)
    return [
        Prompt(str(i), token_ids=tuple(draw.randrange(4, config.vocab_size) for _ in range(config.num_tokens)))
        for i in range(config.limit)
    ]


def text_prompts(config: TextConfig) -> list[Prompt]:
    """The prompts of `data=text`."""
    name, content = content_of(config.path)
    text = text_in(name, content)
    if config.unit is Unit.file:
        pieces = [text]
    elif config.unit is Unit.line:
        pieces = text.split("\n")
    else:
        pieces = [piece.strip("\n") for piece in text.split("\n\n")]
    file, numbered = Path(name).name, enumerate(pieces, start=1)
    prompts = [Prompt(f"{file}:{number}", piece) for number, piece in numbered if piece.strip()]
    if not prompts:
        raise PromptError(f"{name} holds no prompts: it is empty")
    return prompts[: config.limit]


def dataset_prompts(config: DatasetConfig) -> list[Prompt | FailedPrompt]:
    """The prompts of `data=hf`."""
    if config.path is not None:
        return records_of(config.path, config)
    if config.hub is None:
        raise ConfigError("data=hf needs data.hub=DATASET (an id of the Hugging Face hub) or data.path=FILE.jsonl")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"reading {config.hub!r} from the hub needs the package 'datasets': pip install 'emssd[datasets]', "
            f"or give a local copy with data.path=FILE.jsonl"
        ) from error

    def rows() -> Iterator[Record]:
        try:
            for i, row in enumerate(datasets.load_dataset(config.hub, config.subset, split=config.split)):
                yield f"{config.hub}[{i}]", row
        except Exception as error:  # the client raises its own, its HTTP library's, and those of what decodes pictures
            what = " ".join(str(error).split()).rstrip(".")
            raise PromptError(
                f"cannot read dataset {config.hub!r} ({config.subset}, {config.split}): {what}. "
                f"A local copy works with data.path=FILE.jsonl"
            ) from error

    return to_prompts(rows(), config, config.hub)
