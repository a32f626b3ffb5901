"""Loads a causal LM and its tokenizer from a folder, the hub, or the embedded demo."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch

from emssd.errors import ConfigError, OutOfMemoryError
from emssd.model.checkpoint import load_checkpoint
from emssd.model.int8 import round_drafter, round_weights
from emssd.model.parallel import join
from emssd.model.spread import DeviceMap, check_device_map
from emssd.model.support import check_heads
from emssd.model.target import Compile, TargetModel

__all__ = ["LoadModel", "ModelCache", "load_model"]

LoadModel = Callable[..., tuple[TargetModel, Any]]
"""`load_model`, or what stands in for it."""


def load_model(
    path: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    compile: Compile = False,
    architecture: Mapping[str, Any] | None = None,
    device_map: DeviceMap | None = None,
    trust_remote_code: bool = False,
    weights: str = "auto",
    batch_invariant: bool = False,
    for_drafts: bool = False,
    tensor_parallel: bool = False,
    accept: Callable[[Any], None] | None = None,
) -> tuple[TargetModel, Any]:
    """Load a causal LM and its tokenizer from a local folder or the hub.

    Args:
        path: folder or hub id; ``demo`` and ``demo-draft`` are the embedded pair.
        dtype: ``auto`` (the checkpoint's), ``float64``, ``float32``, ``bfloat16`` or ``float16``; PyTorch's dtypes too.
        device: ``auto`` (CUDA if there is one), or a torch device.
        max_model_len, compile, batch_invariant: see `TargetModel`.
        architecture: make a model of this shape with random weights and no tokenizer, and let `path` be no more than
            its name; see `emssd.model.random_weights.counting_model`. Its ``auto`` dtype is bfloat16.
        device_map: put the layers on several devices: ``auto``, ``balanced``, ``sequential``, or a device for each
            module, as Transformers takes it. The KV of a layer lies on its device.
        trust_remote_code: run Python code that comes with the checkpoint, where it needs some.
        weights: ``auto`` (as they are), or ``int8``: rounded, see `emssd.model.int8.round_weights`. That is another
            model, and on CPUs alone. ``compile="auto"`` compiles it, as only a program is faster.
        for_drafts: it is only to draft, so that a compiled program of it may round its weights in the same way.
        tensor_parallel: load a shard of it in each process that torchrun started; all of them call this. If it fails in
            one, it fails in all.
        accept: called with the tokenizer before weights are read; it may raise.

    Raises:
        ConfigError: no such model, dtype or device; or a checkpoint that is damaged or not whole.
        UnsupportedModelError: see `TargetModel`.
        OutOfMemoryError: there is no room for the weights.
    """
    if weights not in ("auto", "int8"):
        raise ConfigError(f"model.weights is {weights!r}; choose auto or int8")
    whole = {
        "model.compile=true": compile is True,
        "model.batch_invariant=true": batch_invariant,
        "model.architecture": bool(architecture),
        "model.weights=int8": weights == "int8",
    }
    if device_map is not None:
        check_device_map(device_map)
        others = {"model.device": device != "auto", **whole, "model.tensor_parallel=true": tensor_parallel}
        if (name := _given(others)) is not None:
            raise ConfigError(f"model.device_map puts one model on several devices by itself; leave it or {name} out")
    if tensor_parallel:
        _check_parallel(device, _given(whole))
        return _load_shard(path, _resolve_dtype(dtype), max_model_len, trust_remote_code)
    if architecture:
        from emssd.model.random_weights import counting_model

        kind = _resolve_dtype("bfloat16" if dtype == "auto" else dtype)
        assert isinstance(kind, torch.dtype)
        model, tokenizer = counting_model(architecture, kind, _resolve_device(device)), None
    else:
        kind, to = _resolve_dtype(dtype), None if device_map is not None else _resolve_device(device)
        model, tokenizer = load_checkpoint(
            path,
            dtype=kind,
            max_model_len=max_model_len,
            trust_remote_code=trust_remote_code,
            device_map=device_map,
            accept=accept,
        )
        try:
            model = model if to is None else model.to(to)  # type: ignore[arg-type]  # annotated for no device at all
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"{to} has no room for the weights of {path!r}; take a smaller one") from error
    if weights == "int8":
        _round(model)
        compile = True if compile == "auto" else compile
    elif for_drafts and compile and device_map is None:
        round_drafter(model)
    target = TargetModel(
        model,
        max_model_len=max_model_len,
        compile=compile,
        frozen=True,
        batch_invariant=batch_invariant,
    )
    return target, tokenizer


def _given(options: Mapping[str, bool]) -> str | None:
    return next((name for name, is_given in options.items() if is_given), None)


def _round(model: Any) -> None:
    if model.device.type != "cpu":
        raise ConfigError(f"model.weights=int8 is for CPUs, and the model is on {model.device}; leave it out")
    if round_weights(model) == 0:
        raise ConfigError(
            f"model.weights=int8 rounds torch.nn.Linear, and {type(model).__name__} has none; leave it out"
        )


class ModelCache:
    """Loads what is asked for once, in the place of `load_model`, as long as one target is in use.

    With the next target, the models of the one before are dropped; so a sweep that alternates targets loads one for
    each run (see *Several models* in ``docs/experiments.md``).
    """

    def __init__(self) -> None:
        self._target: tuple[Any, ...] | None = None
        self._models: dict[tuple[Any, ...], tuple[TargetModel, Any]] = {}

    def target(self, path: str, **options: Any) -> tuple[TargetModel, Any]:
        """The target of a run; options as of `load_model`."""
        key = _key(path, options)
        if key != self._target:
            self._models.clear()
            gc.collect()  # models hold themselves, and there is to be room for the next one
            self._target = key
        return self.draft(path, **options)

    def draft(self, path: str, *, accept: Any = None, **options: Any) -> tuple[TargetModel, Any]:
        """A further model, for a drafter; `accept` is not asked about one that is there."""
        key = _key(path, options)
        if key not in self._models:
            self._models[key] = load_model(path, accept=accept, **options)
        return self._models[key]


def _key(path: str, options: dict[str, Any]) -> tuple[Any, ...]:
    return path, *sorted((name, repr(value)) for name, value in options.items())


def _load_shard(
    path: str, dtype: torch.dtype | str, max_model_len: int | None, trust_remote_code: bool
) -> tuple[TargetModel, Any]:
    group = join()
    with group.agreed():
        model, tokenizer = load_checkpoint(
            path,
            dtype=dtype,
            max_model_len=max_model_len,
            trust_remote_code=trust_remote_code,
            num_shards=group.size,
        )
    with group.agreed():
        target = TargetModel(model, max_model_len=max_model_len, group=group, frozen=True)
        check_heads(target, group.size)
    target.why_compiled = "not compiled: the model is spread over several processes"
    return target, tokenizer


def _check_parallel(device: str, other: str | None) -> None:
    """Refuse to spread a model with an option that is for `other` ones, or on a chosen device. Raises ConfigError."""
    if other is not None:
        hint = ", or save a model of random weights to a folder and give that as model.path"
        raise ConfigError(
            f"{other} is for a whole model in one process; leave it or model.tensor_parallel out"
            + (hint if other == "model.architecture" else "")
        )
    here = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("auto", here):
        raise ConfigError(
            f"device is {device!r}, and with model.tensor_parallel=true every process takes its own {here} device; "
            f"leave model.device out"
        )


def _resolve_dtype(name: str | torch.dtype) -> torch.dtype | str:
    if name == "auto" or isinstance(name, torch.dtype):
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
