"""The files of a checkpoint's folder, and their damages."""

from __future__ import annotations

import json
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch

from emssd.errors import ConfigError
from emssd.model.load.gguf_header import read_header

__all__ = ["check_json", "content_digest", "file_fault", "files_read", "has_vocabulary", "json_fault", "weights_fault"]

# Transformers ignores some of these if they are damaged, and so would lose the EOS ids.
_OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
_WEIGHTS = (  # files and their index; the first kind that is there is read
    ("model*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
)
_VOCABULARIES = ("tokenizer.json", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
_OTHERS = ("added_tokens.json", "chat_template*", "*.py")
_PIECES, _PIECE = 64, 4096  # of a large file of weights, and the bytes of each
_LONGEST_HEADER = 100_000_000  # bytes; safetensors refuses longer ones
_AGAIN = "copy or download it again"


def check_json(source: str) -> None:
    """Raises ConfigError: a small file of the folder `source` is no object of JSON, or a shard is missing."""
    folder = Path(source)
    if not folder.is_dir():
        return  # the hub's files are checked when they are downloaded
    indexes = sorted(folder.glob("*.index.json"))
    for file in (*(folder / name for name in _OBJECTS), *indexes):
        if fault := json_fault(file) or (_index_fault(file) if file in indexes else None):
            raise ConfigError(f"cannot load the model {source!r}: {fault}")


def weights_fault(source: str) -> str | None:
    """The first file of weights in the folder `source` that cannot be read, as a sentence; ``None`` if all can."""
    return next(filter(None, map(file_fault, _weights(Path(source)))), None)


def files_read(folder: Path) -> list[Path]:
    """The files of `folder` that Transformers reads of a model and its tokenizer, in order."""
    files = {file for name in (*_OBJECTS, *_VOCABULARIES, *_OTHERS) for file in folder.glob(name)}
    return sorted(file for file in files.union(_weights(folder)) if file.is_file())


def content_digest(file: Path) -> str:
    """A digest of the content; for a large file of weights, of its size, its header and pieces all over it."""
    with file.open("rb", buffering=0) as content:
        size = file.stat().st_size
        if file.suffix not in (".safetensors", ".bin", ".gguf") or size <= _PIECES * _PIECE:
            return file_digest(content, "sha256").hexdigest()
        digest = sha256(str(size).encode())
        if file.suffix == ".safetensors":
            length = content.read(8)
            digest.update(content.read(min(int.from_bytes(length, "little"), _LONGEST_HEADER)))
        elif file.suffix == ".gguf":
            digest.update(read_header(file).digest.encode())
        for start in range(0, size, size // _PIECES):
            content.seek(start)
            digest.update(content.read(_PIECE))
        return digest.hexdigest()


def _weights(folder: Path) -> list[Path]:
    """The files of weights that Transformers would read; training leaves more behind."""
    for pattern, index in _WEIGHTS:
        names = _shards(folder / index) if (folder / index).is_file() else ()
        if files := sorted({*folder.glob(pattern), *(folder / name for name in names)}):
            return files
    return []


def has_vocabulary(source: str) -> bool:
    """Whether a tokenizer could be made of the folder `source`. A hub id is taken for one that could."""
    folder = Path(source)
    return not folder.is_dir() or any(next(folder.glob(name), None) for name in _VOCABULARIES)


def json_fault(file: Path) -> str | None:
    """The reason why `file` holds no JSON object, as a sentence; ``None`` if it does, or is not there."""
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"{file} is not valid JSON ({error}); {_AGAIN}"
    return None if isinstance(values, dict) else f"{file} holds no JSON object; {_AGAIN}"


def _index_fault(file: Path) -> str | None:
    if not (shards := _shards(file)):
        return f"{file} has no weight_map from tensors to files; {_AGAIN}"
    missing = sorted(name for name in shards if not (file.parent / name).is_file())
    return f"{file.parent / missing[0]} is missing, which {file.name} names; {_AGAIN}" if missing else None


def _shards(index: Path) -> set[str]:
    """The files that `index` names; none if it names anything else."""
    shards: Any = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    names = list(shards.values()) if isinstance(shards, dict) else []
    return set(names) if all(isinstance(name, str) for name in names) else set()


def file_fault(file: Path) -> str | None:
    """The reason why a file of weights cannot be read, as a sentence; ``None`` if it can. No code in it is run."""
    try:
        if not file.is_file():
            return f"{file} is no file"
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(str(file), framework="pt"):
                return None
        torch.load(file, map_location="meta", weights_only=True)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror or error}"
    except Exception as error:  # both libraries have errors of their own
        if file.suffix == ".safetensors":
            return f"{file} is damaged or not complete ({error}); {_AGAIN}"
        return (
            f"{file} is damaged, or holds Python objects that are no tensors, which may run any code; convert it to "
            f"safetensors where it can be trusted"
        )
    return None
