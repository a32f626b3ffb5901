"""The datastore: a folder with token ids, their suffix array, both memory-mapped, and a header that says what they are.

``tokens.npy`` holds every id plus one, most significant byte first, so that the order of ids is the order of bytes; a
zero ends each document, and as no id is stored as zero, no match and no draft runs across it. ``suffixes.npy`` holds
the places of ``tokens.npy`` in the order of what stands there and after it. ``store.json`` is written last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from emssd.data import read_json, typed
from emssd.errors import ConfigError

__all__ = ["END", "HEADER", "SUFFIXES", "TOKENS", "Header", "Store", "fingerprint", "join_documents"]

HEADER, TOKENS, SUFFIXES = "store.json", "tokens.npy", "suffixes.npy"
VERSION = 1
END = 0  # stored after each document; an id is stored as itself plus one

_FORMAT = "emssd-rest"
_NUM_PROBES = 64  # neighbours in the suffix array that are compared when a store is opened
_PROBE_LENGTH = 16
_Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of a store.

    Attributes:
        num_tokens: of all documents, their ends not counted.
        num_ids: every id in the store is below this.
        vocab_size: entries of the tokenizer that made the ids; 0 where they were given.
        tokenizer: `fingerprint` of it; empty where ids were given.
    """

    num_tokens: _Count
    num_documents: _Count
    num_ids: _Count
    vocab_size: _Count = 0
    tokenizer: str = ""
    sources: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The text of ``store.json``."""
        return json.dumps({"format": _FORMAT, "version": VERSION} | asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Header:
        """The header in `text`. Raises ValueError: it holds something else; the message says what."""
        values = read_json(text)
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
            raise ValueError("it is of another program")
        if (version := values.pop("version", None)) != VERSION:
            raise ValueError(f"it is of version {version}, and this emssd reads version {VERSION}")
        return typed(values, cls)


@dataclass(frozen=True, slots=True)
class Store:
    """An open datastore.

    Attributes:
        tokens: ``[n]`` big-endian uint16 or uint32, ``n = num_tokens + num_documents``: ids plus one, and `END`.
        suffixes: ``[n]`` int32 or int64.
    """

    path: Path
    header: Header
    tokens: npt.NDArray[Any]
    suffixes: npt.NDArray[Any]

    @classmethod
    def open(cls, folder: str | Path) -> Store:
        """Map the store in `folder` into memory, if it is not damaged as far as a quick look can tell."""
        path = Path(folder).expanduser()
        make = f"make one with: emssd-rest build CORPUS.jsonl {folder} --tokenizer MODEL"
        if not path.is_dir():
            raise ConfigError(f"store {folder}: no such folder (looked in {Path.cwd()}); {make}")
        if not (path / HEADER).is_file():
            raise ConfigError(f"store {folder} has no {HEADER}, so it is no datastore of emssd-rest; {make}")
        try:
            header = Header.from_json((path / HEADER).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"store {folder}: {HEADER} cannot be used: {error}; build the store anew") from error
        try:
            tokens, suffixes = _mapped(path / TOKENS), _mapped(path / SUFFIXES)
            _check(header, tokens, suffixes)
        except ValueError as error:
            raise ConfigError(f"store {folder} is damaged: {error}; build it anew") from error
        return cls(path, header, tokens, suffixes)


def fingerprint(tokenizer: Any) -> str:
    """A digest of all tokens and their ids; tokenizers of the same fingerprint can share a store."""
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token_id} {token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def join_documents(documents: Iterable[Seq[int]]) -> tuple[npt.NDArray[Any], Header]:
    """The array ``tokens [n]`` of `documents`, which are lists of ids, and its header, still without names.

    Empty documents are left out.
    """
    parts = []
    for document in documents:
        if len(document):
            part = np.full(len(document) + 1, END, dtype=np.int64)
            part[:-1] = np.asarray(document, dtype=np.int64) + 1
            if part[:-1].min() <= END:
                raise ConfigError(f"a document has the token id {part[:-1].min() - 1}; ids are 0 or more")
            parts.append(part.astype(np.uint32))
    if not parts:
        raise ConfigError("the corpus holds no text, so there is nothing to draft from; give another")
    tokens = np.concatenate(parts)
    num_ids = int(tokens.max())
    header = Header(len(tokens) - len(parts), len(parts), num_ids)
    return tokens.astype(">u2" if num_ids <= np.iinfo(np.uint16).max else ">u4"), header


def _mapped(path: Path) -> npt.NDArray[Any]:
    """The array in a file, without the cost of numpy's memmap class. Raises ValueError: it cannot be read."""
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except Exception as error:  # numpy reads the head of a file as Python, so that any byte may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path.name} cannot be read: {reason}") from error


def _check(header: Header, tokens: npt.NDArray[Any], suffixes: npt.NDArray[Any]) -> None:
    """Raises `ValueError` if these cannot be the arrays of a store with this header."""
    num_places = header.num_tokens + header.num_documents
    if tokens.dtype.str not in (">u2", ">u4") or suffixes.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise ValueError(f"{TOKENS} holds {tokens.dtype}, and {SUFFIXES} {suffixes.dtype}")
    if tokens.shape != (num_places,) or suffixes.shape != (num_places,) or header.num_documents < 1:
        raise ValueError(
            f"{TOKENS} has the shape {tokens.shape} and {SUFFIXES} {suffixes.shape}, and {HEADER} tells of "
            f"{num_places} places"
        )
    if tokens[-1] != END:
        raise ValueError(f"{TOKENS} does not end with the end of a document")
    for i in np.linspace(0, num_places - 2, _NUM_PROBES).astype(int).tolist():
        pair = [int(start) for start in suffixes[i : i + 2]]
        if min(pair) < 0 or max(pair) >= num_places:
            raise ValueError(f"{SUFFIXES} points outside of {TOKENS}")
        first, second = (tokens[start : start + _PROBE_LENGTH].tobytes() for start in pair)
        if first > second or pair[0] == pair[1]:
            raise ValueError(f"{SUFFIXES} at {i} is out of the order of {TOKENS}")
