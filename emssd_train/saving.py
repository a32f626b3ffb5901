"""Files of a trained drafter, each written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from emssd.errors import OutputError

__all__ = ["save_files", "whole_files"]


def save_files(folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    """Write ``model.safetensors`` and then ``config.json``.

    Args:
        folder: for the files.
        config: values of ``config.json``.
        weights: by name, contiguous and on the CPU.

    Raises:
        OutputError: they cannot be written.
    """
    from safetensors.torch import save

    with whole_files(folder) as unfinished:
        (unfinished / "model.safetensors").write_bytes(save({**weights}, {"format": "pt"}))
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def whole_files(folder: Path) -> Iterator[Path]:
    """A folder to write files to, which are moved to `folder` when all are written, ``config.json`` last.

    Raises:
        OutputError: they cannot be written.
    """
    unfinished = folder / ".unfinished"
    try:
        unfinished.mkdir(exist_ok=True)
        yield unfinished
        for file in sorted(unfinished.iterdir(), key=lambda file: (file.name == "config.json", file.name)):
            os.replace(file, folder / file.name)
        unfinished.rmdir()
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror or error}") from error
