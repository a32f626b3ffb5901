"""Loads a causal LM and its tokenizer from a folder, the hub, or the embedded demo.

For timing without a checkpoint, it makes models of any shape with random weights, whose greedy text is known.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from emssd.data.model_options import ModelOptions
from emssd.errors import ConfigError, OutOfMemoryError, did_you_mean
from emssd.errors.faults import described
from emssd.model.compile.linears import lay_together
from emssd.model.compile.packed import round_drafter, round_weights
from emssd.model.hf.device_map import check_device_map, check_heads
from emssd.model.load.checkpoint import load_checkpoint
from emssd.model.run.parallel import join
from emssd.model.run.target import TargetModel

__all__ = ["LoadModel", "ModelCache", "counted_on", "counting_model", "load_model"]

LoadModel = Callable[..., tuple[TargetModel, Any]]
"""`load_model`, or a function that replaces it."""

_SMALL, _LARGE = 0.005, 4.0  # standard deviations: of weights in layers, and of embeddings, which outweigh them
_PROJECTION = 0.02  # of the embeddings' size, so that logits stay in the range of half precision


def load_model(
    options: ModelOptions, *, accept: Callable[[Any], None] | None = None, draft_of: TargetModel | None = None
) -> tuple[TargetModel, Any]:
    """Load a causal LM and its tokenizer from a local folder or the hub.

    Args:
        options: with ``tensor_parallel``, all processes that torchrun started call this, each loads a shard, and a
            failure is one of all.
        accept: called with the tokenizer before weights are read; it may raise.
        draft_of: the target of this draft model, which is compiled if that is, with its weights rounded to int8.

    Raises:
        ConfigError: no such model, dtype or device; or a checkpoint that is damaged or not whole.
        UnsupportedModelError: see `TargetModel`.
        OutOfMemoryError: there is no room for the weights.
    """
    options.check()
    if options.device_map is not None:
        check_device_map(options.device_map)
    if options.tensor_parallel:
        return _load_shard(options)
    dtype, device = _resolve_dtype(options.dtype), _resolve_device(options.device)
    if options.architecture:
        model, tokenizer = counting_model(options.architecture, dtype or torch.bfloat16, device), None
    else:
        packed = options.weights == "auto" and device.type == "cpu" and options.device_map is None
        model, tokenizer = load_checkpoint(options, dtype, packed=packed, accept=accept)
    try:
        model = model if options.device_map is not None else model.to(device)
        if device.type == "cuda" and options.device_map is None:
            lay_together(model)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"{device} has no room for the weights of {options.path!r}; take a smaller one"
        ) from error
    if options.weights == "int8":
        if model.device.type != "cpu":
            raise ConfigError(f"model.weights=int8 is for CPUs, and the model is on {model.device}; leave it out")
        if round_weights(model) == 0:
            raise ConfigError(
                f"model.weights=int8 rounds torch.nn.Linear, and {type(model).__name__} has none; leave it out"
            )
    if draft_of is not None and draft_of.compiled is not None:
        options = replace(options, compile=draft_of.may_compile)
        round_drafter(model)
    return TargetModel(model, options, frozen=True), tokenizer


class ModelCache:
    """Loads each model once, as `load_model` does, while one target is in use. The next target drops them all."""

    def __init__(self) -> None:
        self._target = ""
        self._models: dict[str, tuple[TargetModel, Any]] = {}

    def target(self, options: ModelOptions) -> tuple[TargetModel, Any]:
        if repr(options) != self._target:
            self._models.clear()
            gc.collect()  # models hold themselves, and the next one needs the room
            self._target = repr(options)
        return self.load(options)

    def load(
        self, options: ModelOptions, *, accept: Any = None, draft_of: TargetModel | None = None
    ) -> tuple[TargetModel, Any]:
        """As `load_model`; `accept` is not asked about a model that is loaded already."""
        key = repr((options, draft_of is not None))
        if key not in self._models:
            self._models[key] = load_model(options, accept=accept, draft_of=draft_of)
        return self._models[key]


def _load_shard(options: ModelOptions) -> tuple[TargetModel, Any]:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device not in ("auto", here):
        raise ConfigError(
            f"device is {options.device!r}, and with model.tensor_parallel=true every process takes its own {here} "
            f"device; leave model.device out"
        )
    group = join()
    with group.agreed():
        model, tokenizer = load_checkpoint(options, _resolve_dtype(options.dtype), num_shards=group.size)
    with group.agreed():
        target = TargetModel(model, replace(options, compile=False), group=group, frozen=True)
        check_heads(target, group.size)
    target.why_compiled = "not compiled: the model is spread over several processes"
    return target, tokenizer


def _resolve_dtype(name: str) -> torch.dtype | None:
    """``None`` for ``auto``."""
    dtypes = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto" and name not in dtypes:
        raise ConfigError(f"unknown dtype {name!r}; choose auto, {', '.join(dtypes)}")
    return dtypes.get(name)


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here ({described(error)}); try device=cpu") from error
    return device


def counting_model(architecture: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    """A causal LM whose greedy continuation of a text that ends in token ``t`` is ``t + 1, t + 2, …``.

    Weights are random (seed 0), but embeddings outweigh the layers, and the vocabulary projection is the embeddings
    moved on by one. So the next token is certain by a wide margin, and every engine must generate the same text.

    `architecture` has ``model_type`` and values that differ from the defaults of its config. Embeddings are untied,
    whatever ``tie_word_embeddings`` says: the projection needs its own weights.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(architecture)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise ConfigError("model.architecture has no model_type; add one, as in model.architecture.model_type=opt")
    try:
        default = AutoConfig.for_model(model_type)
        if unknown := [name for name in values if not hasattr(default, name)]:  # Transformers would keep it
            guess = did_you_mean(unknown[0], default.to_dict())
            raise ConfigError(f"model.architecture of type {model_type!r} has no value {unknown[0]!r}{guess}")
        config = AutoConfig.for_model(model_type, **(values | {"tie_word_embeddings": False}))
        if config.get_text_config().vocab_size < 1:
            raise ConfigError("model.architecture.vocab_size is 0 or less; there must be a token to generate")
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except ConfigError:
        raise
    except Exception as error:  # the code of a hundred architectures meets values that it was never meant for
        message = " ".join(str(error).split())[:300]  # some are of several lines, or list all models
        kind = "" if isinstance(error, (ValueError, StrictDataclassError)) else f"{type(error).__name__}: "
        raise ConfigError(f"model.architecture makes no model of type {model_type!r}: {kind}{message}") from error
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, _SMALL, generator=generator)
        embedding = model.get_input_embeddings().weight
        embedding.normal_(0.0, _LARGE, generator=generator)
        model.get_output_embeddings().weight.copy_(embedding.roll(1, dims=0) * _PROJECTION)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.config.eos_token_id = None
    return model.eval()


def counted_on(token: int, count: int, vocab_size: int) -> list[int]:
    """The `count` tokens that a `counting_model` generates after `token`."""
    return [(token + 1 + i) % vocab_size for i in range(count)]
