"""Reads a trained head from a folder, a file or a hub id: its config and its tensors, read without running any code."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from emssd.data.demo import model_path
from emssd.errors import ConfigError, EmssdError
from emssd.model.load.checkpoint_files import file_fault

__all__ = ["Checkpoint", "cannot_load", "in_short", "read_checkpoint", "reading_config"]

# The first kind that is there is read; those that run no code come first.
_WEIGHTS = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_EMBEDDED = "demo-eagle3"
_SUFFIXES = (".safetensors", ".bin", ".pt", ".index.json")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a trained head.

    Attributes:
        path: as the user gave it.
        source: the file of weights that was read, or the list of several.
        tensors: by the names in the file. They are mapped from it, so unused ones take no memory.
    """

    path: str
    source: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


def read_checkpoint(path: str) -> Checkpoint:
    """Read the head at `path`: a folder, one of its files of weights, or an id of the Hugging Face hub.

    ``demo-eagle3`` is the embedded head for the demo's target.

    Raises:
        ConfigError: something is missing or damaged, or is a pickle with more than tensors in it.
    """
    source = _source(path)
    config = _json(path, source.parent / "config.json")
    tensors: dict[str, torch.Tensor] = {}
    for file in _shards(path, source):
        tensors |= _read(path, file)
    return Checkpoint(path, source, config, tensors)


def cannot_load(path: str, why: str) -> ConfigError:
    """The error for a head at `path`, for the reason `why`."""
    if path == _EMBEDDED:
        why += "; this is the demo's head, so give drafter.path=FOLDER, or a hub id, for that of your model"
    return ConfigError(f"cannot load the trained head {path!r}: {why}")


def in_short(error: Exception) -> str:
    """The beginning of a library's message, in one line."""
    return " ".join(str(error).split())[:200].rstrip(" .")


@contextmanager
def reading_config(path: str) -> Iterator[None]:
    """For what reads the ``config.json`` of the head at `path`.

    Raises:
        ConfigError: a value is of another type than the body takes.
    """
    try:
        yield
    except EmssdError:
        raise
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError) as error:
        why = f"its config.json has a value of another type or size than expected ({error}); repair that file"
        raise cannot_load(path, why) from error


def _source(path: str) -> Path:
    local = model_path("eagle3") if path == _EMBEDDED else Path(path).expanduser()
    if local.is_file():
        if not local.name.endswith(_SUFFIXES):
            raise cannot_load(path, f"it is no file of weights, whose names end with {', '.join(_SUFFIXES)}")
        return local
    folder = local if local.is_dir() else _from_hub(path)
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise cannot_load(path, f"{folder} has no file of weights; one of {', '.join(_WEIGHTS)} must be there")


def _from_hub(path: str) -> Path:
    from huggingface_hub import snapshot_download

    if path.startswith(("/", ".", "~")):
        raise cannot_load(path, "there is no such folder or file")
    try:
        return Path(snapshot_download(path, allow_patterns=["config.json", *(f"*{suffix}" for suffix in _SUFFIXES)]))
    except (OSError, ValueError) as error:  # among them all errors of the hub
        why = f"it is no local folder, and the Hugging Face hub does not give it ({in_short(error)})"
        raise cannot_load(path, why) from error


def _shards(path: str, source: Path) -> list[Path]:
    if source.suffix != ".json":
        return [source]
    names = _json(path, source).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise cannot_load(path, f"{source} has no weight_map from tensors to files")
    return [source.parent / name for name in sorted(set(names.values()))]


def _json(path: str, file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise cannot_load(path, f"{file} is missing") from None
    except (OSError, RecursionError, ValueError) as error:
        raise cannot_load(path, f"{file} cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise cannot_load(path, f"{file} holds no JSON object")
    return values


def _read(path: str, file: Path) -> dict[str, torch.Tensor]:
    if fault := file_fault(file):
        raise cannot_load(path, fault)
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file) or None)
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise cannot_load(path, f"{file} is no dictionary of tensors")
    return tensors
