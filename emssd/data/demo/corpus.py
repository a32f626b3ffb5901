"""Turns the topics of Python's own documentation into documents, passages and prompts."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, pairwise
from random import Random

from emssd.data.prompts import Prompt
from emssd.errors import PromptError

__all__ = ["RESTATE_LENGTH", "Document", "digest", "documents", "make_prompts", "passage_of", "restate_prompt"]

# A title and its underline; documents begin there.
_HEADING = re.compile(r"""^(?=\S[^\n]*\n([*=~^"#-])\1{2,}\n)""", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n\s*\n")

# Statements and expressions of the language reference: little enough text for a small model to learn it by heart. A
# topic that the running Python does not have is left out.
_TOPICS = (
    "assert", "assignment", "booleans", "break", "calls", "class", "context-managers", "continue", "conversions",
    "del", "dict", "exceptions", "execmodel", "global", "identifiers", "import", "integers", "lambda", "lists",
    "nonlocal", "numbers", "pass", "power", "raise", "return", "shifting", "slicings", "strings", "subscriptions",
    "truth", "try", "unary", "yield",
)  # fmt: skip
_MARKER = "Once more:"
_MIN_DOCUMENT = 150  # characters
_PROSE = range(100, 420)  # characters of a paragraph that can be restated
_FULL_LINE = 45  # characters; prose is wrapped at about 70, code and tables have shorter lines
_CONTINUE_LENGTH = range(130, 750)  # characters of a prompt; about 3.2 are a token
RESTATE_LENGTH = range(200, 420)  # characters of a passage to restate
_MIN_REST = 80  # characters that a passage leaves to continue with


@dataclass(frozen=True, slots=True)
class Document:
    """One section of the documentation: a name, and its paragraphs as pydoc prints them."""

    name: str
    paragraphs: tuple[str, ...]

    @property
    def starts(self) -> list[int]:
        """Indices of the paragraphs that a passage may begin with: an indented one belongs to the one before."""
        return [index for index, text in enumerate(self.paragraphs) if index == 0 or not text[0].isspace()]

    @property
    def prose(self) -> list[str]:
        """The paragraphs that are plain sentences, without their indentation."""
        prose = []
        for paragraph in self.paragraphs:
            text = textwrap.dedent(paragraph)
            *full, last = text.split("\n")
            plain = text[0].isupper() and text[-1] == "." and not any(line[0].isspace() for line in (*full, last))
            if plain and len(text) in _PROSE and min(map(len, full), default=_FULL_LINE) >= _FULL_LINE:
                prose.append(text)
        return prose


def documents() -> list[Document]:
    """The sections of some of the running Python's `pydoc_data.topics`, in the order of the topics' names.

    Topics repeat each other's sections; a section most of whose paragraphs came before is left out.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise PromptError(
            "this Python was installed without its documentation (module pydoc_data), which the prompts of "
            "the demo are made from; use another prompt source, such as data=text data.path=FILE"
        ) from error

    docs: list[Document] = []
    seen: set[str] = set()
    for topic in _TOPICS:
        for number, section in enumerate(_sections(topics.get(topic, ""))):
            pieces = _BLANK_LINES.split(section.strip("\n"))
            paragraphs = tuple(piece.rstrip() for piece in pieces if piece.strip())
            new = [paragraph for paragraph in paragraphs if paragraph not in seen]
            if len(section) >= _MIN_DOCUMENT and 2 * len(new) >= len(paragraphs):
                docs.append(Document(f"{topic}-{number}", paragraphs))
                seen.update(new)
    return docs


def digest(docs: Seq[Document]) -> str:
    """SHA-256 of all paragraphs, in hexadecimal."""
    text = "\n\n".join(paragraph for doc in docs for paragraph in doc.paragraphs)
    return hashlib.sha256(text.encode()).hexdigest()


def make_prompts(docs: Seq[Document], salt: str = "") -> list[Prompt]:
    """Two prompts of each document that has enough text: to continue a passage, and to restate one.

    The order mixes topics, and takes eight prompts of each kind by turns: a static batch takes as many steps as its
    slowest row, so its rows should be alike. With another `salt`, other passages are taken.
    """
    kinds: list[list[Prompt]] = [[], []]
    for doc in sorted(docs, key=lambda doc: digest([doc])):
        rng = Random(digest([doc]) + salt)
        to_continue = _continue_prompt(doc, rng)
        if to_continue is not None:
            kinds[0].append(Prompt(f"{doc.name}-continue", to_continue))
        paragraphs = doc.prose
        if len(paragraphs) >= 2:
            passage = passage_of(paragraphs, rng.randrange(len(paragraphs) - 1), rng.choice(RESTATE_LENGTH))
            kinds[1].append(Prompt(f"{doc.name}-restate", restate_prompt(passage)))
    return list(chain.from_iterable(kind[start : start + 8] for start in range(0, 512, 8) for kind in reversed(kinds)))


def _sections(text: str) -> list[str]:
    cuts = sorted({0, len(text), *(match.start() for match in _HEADING.finditer(text))})
    return [text[begin:end] for begin, end in pairwise(cuts)]


def _continue_prompt(doc: Document, rng: Random) -> str | None:
    """The beginning of a passage, up to the end of some word; ``None`` if the document is too short."""
    size = rng.choice(_CONTINUE_LENGTH)
    passages = ["\n\n".join(doc.paragraphs[start:]) for start in doc.starts]
    passages = [passage for passage in passages if len(passage) >= size + _MIN_REST]
    if not passages:
        return None
    return rng.choice(passages)[:size].rsplit(maxsplit=1)[0].rstrip()


def passage_of(paragraphs: Seq[str], start: int, size: int) -> list[str]:
    """Paragraphs from `start` on, at least two, and more while they stay within `size` characters."""
    passage = list(paragraphs[start : start + 2])
    for paragraph in paragraphs[start + 2 :]:
        if sum(map(len, passage)) + len(paragraph) > size:
            break
        passage.append(paragraph)
    return passage


def restate_prompt(passage: Seq[str]) -> str:
    """The paragraphs of `passage`, and the marker that asks for them once more."""
    return "\n\n".join((*passage, _MARKER))
