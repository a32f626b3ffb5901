"""The header of a GGUF file: its architecture, where its tensors are, and the scaling of rotary frequencies.

It is read without the vocabulary. Transformers does not read the scaling.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from emssd.errors import ConfigError

__all__ = ["DIVISORS", "Header", "Stored", "read_header", "set_rotary"]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _ALIGNMENT = 8, 9, 32
_VERSIONS = (2, 3)

DIVISORS = "rope_freqs.weight"
"""A tensor that divides the frequencies; llama.cpp's converter writes it for Llama 3."""
_LINEAR = {"factor": "factor"}
_KINDS = {"linear": _LINEAR, "yarn": _LINEAR | {"original_context_length": "original_max_position_embeddings"}}
_TOLERANCE = 1e-5  # relative, of what a converter computed in float32


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


def set_rotary(config: Any, header: Header, divisors: np.ndarray | None) -> None:
    """Give `config` the scaling of a file's metadata, or the one with these `divisors` ``[head_dim / 2]``.

    Raises ConfigError: it is neither linear, nor YaRN, nor Llama 3's.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # the layers that are scaled
    if rope.get("rope_type") != "default":
        return  # there is none, or Transformers knows it
    values = {key.partition(".rope.scaling.")[2]: value for key, value in header.values.items()}
    if (kind := values.get("type", "linear" if "factor" in values else "none")) != "none":
        names, others = _KINDS.get(kind, {}), values.keys() - {"", "type", "finetuned"}
        if not names.keys() <= others <= _KINDS["yarn"].keys() or not names:
            raise _unknown(f"is {kind} by {', '.join(sorted(others))}")
        rope |= {"rope_type": kind} | {name: values[key] for key, name in names.items()}
    elif divisors is not None:
        rope |= _llama3(divisors.astype(np.float64), rope["rope_theta"])


def _llama3(divisors: np.ndarray, theta: float) -> dict[str, Any]:
    """Llama 3's scaling of the frequencies of `theta` that divides by these.

    It divides slow waves by `factor`. The share of a frequency that is not divided grows with the turns per token:
    ``(original * turns - low) / (high - low)``, from 0 to 1. Their ratios count, so `low` is 1, as in Llama 3.
    """
    factor = float(divisors.max())
    turns = theta ** -(np.arange(len(divisors)) / len(divisors)) / (2 * np.pi)
    share = (1 / divisors - 1 / factor) / max(1 - 1 / factor, _TOLERANCE)
    between = (share > _TOLERANCE) & (share < 1 - _TOLERANCE)
    if between.sum() > 1:
        slope, start = np.polyfit(turns[between], share[between], 1)
        high, original = round(float(1 - 1 / start), 3), round(float(-slope / start))
        share = np.clip((original * turns - 1) / (high - 1), 0, 1)
        if np.allclose(1 / ((1 - share) / factor + share), divisors, rtol=_TOLERANCE):
            sizes = {"original_max_position_embeddings": original, "low_freq_factor": 1.0, "high_freq_factor": high}
            return {"rope_type": "llama3", "factor": factor} | sizes
    raise _unknown(f"has other divisors ({DIVISORS}) than Llama 3's")


def _unknown(scaling: str) -> ConfigError:
    return ConfigError(f"the rotary scaling of the GGUF file {scaling}; emssd reads linear, YaRN and that of Llama 3")
