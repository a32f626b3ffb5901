"""The header of a GGUF file: its architecture and where its tensors are. It is read without the vocabulary."""

from __future__ import annotations

import struct
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from emssd.errors import ConfigError

__all__ = ["Header", "Stored", "read_header"]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _ALIGNMENT = 8, 9, 32
_VERSIONS = (2, 3)


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        shape: as PyTorch has it, the largest step first.
        kind: the number of its type, see `gguf.GGMLQuantizationType`.
        start: its first byte, counted from the start of the tensors.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


class Header(NamedTuple):
    """A file's description of itself and its tensors.

    Attributes:
        values: metadata by their names, without arrays.
        first: the byte of the file where tensors begin.
        digest: of the header and of the file's size.
    """

    values: dict[str, Any]
    tensors: tuple[Stored, ...]
    first: int
    digest: str

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", "unknown"))


def read_header(file: Path) -> Header:
    """Raises ConfigError: it is no GGUF file, it is damaged, or it is a part of one."""
    with file.open("rb") as start:
        if start.read(4) != b"GGUF":
            raise ConfigError(f"{file} is no GGUF file, as it does not begin with GGUF; give one, or a folder")
    size = file.stat().st_size
    reader = _Reader(np.memmap(file, mode="r").data)
    try:
        version, num_tensors, num_values = reader.take("4xIQQ")
        if version not in _VERSIONS:
            raise ConfigError(f"{file} is GGUF version {version}; convert it to version 3")
        values = {reader.text(): reader.value(*reader.take("I")) for _ in range(num_values)}
        tensors = []
        for _ in range(num_tensors):
            name, (num_dims,) = reader.text(), reader.take("I")
            shape = reader.take(f"{num_dims}Q")
            tensors.append(Stored(name, tuple(reversed(shape)), *reader.take("IQ")))
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is damaged or not complete; copy or download it again") from error
    if (parts := values.get("split.count", 1)) > 1:
        raise ConfigError(f"{file} is one of {parts} parts; make one file with llama-gguf-split --merge")
    first = reader.at + -reader.at % values.get("general.alignment", _ALIGNMENT)
    digest = sha256(reader.data[: reader.at].tobytes() + size.to_bytes(8, "little")).hexdigest()
    return Header(values, tuple(tensors), first, digest)


class _Reader:
    """Reads numbers and texts of `data` one after another; beyond the end, `struct.error`."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{kinds}", self.data, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        (text,) = self.take(f"{length}s")
        return str(text, "utf-8")

    def value(self, kind: int) -> Any:
        """A value of metadata; ``None`` for an array."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.take(_NUMBERS[kind])[0]
        kind, count = self.take("IQ")
        if kind in _NUMBERS:
            self.at += count * struct.calcsize(_NUMBERS[kind])
            return None
        for _ in range(count):
            self.value(kind)
        return None
