"""Loads a causal LM and its tokenizer from a folder, the hub, or the embedded demo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from emssd.errors import ConfigError, OutOfMemoryError
from emssd.model.checkpoint import load_checkpoint
from emssd.model.target import TargetModel

__all__ = ["LoadModel", "load_model"]

LoadModel = Callable[..., tuple[TargetModel, Any]]
"""`load_model`, or what stands in for it."""


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    compile: bool = False,
    architecture: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> tuple[TargetModel, Any]:
    """Load a causal LM and its tokenizer from a local folder or the hub.

    Args:
        path: folder or hub id; ``demo`` and ``demo-draft`` are the embedded pair.
        dtype: ``auto`` (the checkpoint's), ``float64``, ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` (CUDA if there is one), or a torch device.
        max_model_len, compile: see `TargetModel`.
        architecture: make a model of this shape with random weights and no tokenizer, and let `path` be no more than
            its name; see `emssd.model.random_weights.counting_model`. Its ``auto`` dtype is bfloat16.
        trust_remote_code: run Python code that comes with the checkpoint, where it needs some.

    Raises:
        ConfigError: no such model, dtype or device; or a checkpoint that is damaged or not whole.
        UnsupportedModelError: see `TargetModel`.
        OutOfMemoryError: there is no room for the weights.
    """
    if architecture:
        from emssd.model.random_weights import counting_model

        kind = _resolve_dtype("bfloat16" if dtype == "auto" else dtype)
        assert isinstance(kind, torch.dtype)
        made = counting_model(architecture, kind, _resolve_device(device))
        return TargetModel(made, max_model_len=max_model_len, compile=compile), None
    torch_dtype, torch_device = _resolve_dtype(dtype), _resolve_device(device)
    model, tokenizer = load_checkpoint(
        path, dtype=torch_dtype, max_model_len=max_model_len, trust_remote_code=trust_remote_code
    )
    try:
        model.to(torch_device)  # type: ignore[arg-type]  # annotated for no device at all
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"{torch_device} has no room for the weights of {path!r}; take a smaller one") from error
    return TargetModel(model, max_model_len=max_model_len, compile=compile), tokenizer


def _resolve_dtype(name: str) -> torch.dtype | str:
    if name == "auto":
        return name
    known = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"unknown dtype {name!r}; choose auto, {', '.join(known)}")
    return known[name]


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {_first_line(error)} Try device=cpu.") from error
    return device


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    first = text[0].rstrip(" :,") if text else type(error).__name__
    return first if first.endswith((".", "!")) else first + "."
