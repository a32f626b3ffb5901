"""Models of GGUF files: config and tokenizer are converted once and kept; weights stay packed as the file has them."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from emssd.errors import ConfigError
from emssd.model.compile.packed import pack
from emssd.model.load.gguf_blocks import KINDS, rounded_of
from emssd.model.load.gguf_header import DIVISORS, Header, Stored, read_header, set_rotary
from emssd.native import entry

__all__ = ["converted_folder", "load_packed", "name_model", "read_rotary"]

_DENSE = "model.weights=dense loads such a file, in the memory of a dense model"


def converted_folder(file: Path, part: str) -> Path:
    """A folder of the cache with the ``config`` or ``tokenizer`` that Transformers makes of the file's header."""
    from transformers import AutoConfig, AutoTokenizer

    maker: Any = {"config": AutoConfig, "tokenizer": AutoTokenizer}[part]
    header = _checked(file)

    def convert(folder: Path) -> None:
        logging.getLogger("emssd").warning(
            "converting the %s of %s, once; a large vocabulary takes a minute or two …", part, file.name
        )
        maker.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)

    return entry(f"gguf-{part}", header.digest, convert).folder


def read_rotary(file: Path, config: Any) -> None:
    """Give `config` the file's scaling of rotary frequencies. Raises ConfigError: it is of an unknown kind."""
    header = read_header(file)
    divisors = next((_blocks(file, header, stored) for stored in header.tensors if stored.name == DIVISORS), None)
    set_rotary(config, header, None if divisors is None else divisors.numpy().view(np.float32))


def load_packed(file: Path, config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model of a file, with packed linear layers and embeddings, and Transformers' report on its loading.

    Nothing is packed if the report names tensors of other shapes.

    A tensor that is no matrix of blocks, or that Transformers converts by more than an order of rows, is made dense.

    Raises:
        ConfigError: a tensor is of a type that cannot be packed, or is cut off; or names of tensors are not known.
    """
    import gguf
    from accelerate import init_empty_weights
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    header, model_class = _checked(file), cast("Any", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    with init_empty_weights(include_buffers=False):
        model = model_class._from_config(config, dtype=dtype).eval()
    processor, names = _conversion(file, header.architecture, model)
    expected, shapes = model.state_dict(), dict[str, tuple[int, ...]]()
    state, matrices = dict[str, torch.Tensor](), list[tuple[str, Stored, str, Any]]()
    for stored in header.tensors:
        kind, name = gguf.GGMLQuantizationType(stored.kind), names.get(stored.name)
        if stored.name == DIVISORS and "llama3" in (getattr(config, "rope_parameters", None) or {}).values():
            continue
        order = None if name is None or kind.name not in KINDS else _order(processor, stored)
        if name is not None and order is not None:
            matrices.append((name, stored, kind.name, order))
            shapes[name] = stored.shape
            continue
        if kind.name not in (*KINDS, "F32", "F16", "BF16"):
            kinds = ", ".join(KINDS)
            raise ConfigError(f"{stored.name} has blocks of type {kind.name}, and emssd packs {kinds}; {_DENSE}")
        values = gguf.dequantize(_blocks(file, header, stored).numpy(), kind).reshape(stored.shape)
        result = processor.process(
            weights=values, name=stored.name, tensor_key_mapping=names, parsed_parameters={"tensors": state}
        )
        if result.name is not None:  # else the processor has put it into `state`
            state[names.get(result.name, result.name)] = torch.from_numpy(np.array(result.weights))
    shapes |= {name: tuple(tensor.shape) for name, tensor in state.items()}
    other = [(name, shape, tuple(expected[name].shape)) for name, shape in shapes.items() if name in expected]
    mismatched = [(name, is_, should) for name, is_, should in other if is_ != should]
    info = {"mismatched_keys": mismatched, "unexpected_keys": {*shapes} - {*expected}, "missing_keys": set[str]()}
    if not mismatched:
        state = {name: tensor.to(expected[name].dtype) for name, tensor in state.items() if name in expected}
        model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()
        matrices.sort(key=lambda matrix: prod(matrix[1].shape), reverse=True)  # the largest takes most, for a moment
        for full_name, stored, type_name, order in matrices:
            if full_name in expected:
                pack(model, full_name, rounded_of(_blocks(file, header, stored)[order], type_name))
        info["missing_keys"] = {name for name, weight in model.named_parameters() if weight.is_meta}
    return model, info


def name_model(model: Any, file: Path) -> None:
    """Put `file` down as the origin of a loaded model, and forget that Transformers read it: its weights are dense."""
    for holder, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)
    model.name_or_path = str(file)


def _conversion(file: Path, architecture: str, model: Any) -> tuple[Any, dict[str, str]]:
    """Transformers' processor of the tensors of an architecture, and the model's names by those of the file."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    make: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor = make(config=model.config.to_dict())
    try:
        return processor, get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as error:
        raise ConfigError(f"{file} is of architecture {architecture!r}, which emssd does not pack; {_DENSE}") from error


def _blocks(file: Path, header: Header, stored: Stored) -> torch.Tensor:
    """The bytes of a tensor, by its last dimension, in memory only while they are in use."""
    import gguf

    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(stored.kind)]
    shape = (*stored.shape[:-1], stored.shape[-1] // numbers * size)
    start = header.first + stored.start
    if file.stat().st_size < start + prod(shape):
        raise ConfigError(f"{file} ends within {stored.name}; copy or download it again")
    return torch.from_numpy(np.memmap(file, np.uint8, "c", start, shape))


def _order(processor: Any, stored: Stored) -> Any:
    """The rows of a stored matrix in the order of the model's; ``None`` if it is no matrix, or more is done to it."""
    if len(stored.shape) != 2:
        return None
    numbers = np.arange(stored.shape[0])[:, None]
    try:
        converted = processor.process(
            weights=numbers, name=stored.name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
        )
    except (ValueError, KeyError):  # it needs the columns too
        return None
    if converted.name != stored.name or converted.weights.shape != numbers.shape:
        return None
    if np.array_equal(converted.weights, numbers):
        return slice(None)  # no copy
    order = converted.weights[:, 0]
    return torch.from_numpy(np.array(order)) if np.array_equal(np.sort(order), numbers[:, 0]) else None


def _checked(file: Path) -> Header:
    """Its header. Raises ConfigError: gguf is not installed, Transformers converts no such model, or it is cut off."""
    from transformers import integrations
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if find_spec("gguf") is None:
        raise ConfigError("a GGUF file needs the package gguf; pip install 'emssd[gguf]'")
    header = read_header(file)
    more = getattr(getattr(integrations, "gguf", None), "GGUF_CONFIG_ARCHS", {})  # newer versions have other tables
    possible = {*GGUF_SUPPORTED_ARCHITECTURES, *more, "gpt-oss", "minimax-m2", "qwen2moe", "qwen3moe"}
    if header.architecture not in possible:
        names = ", ".join(sorted(possible & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *more}))
        raise ConfigError(f"{file} is of architecture {header.architecture!r}, and Transformers converts {names}")
    for stored in header.tensors:
        _blocks(file, header, stored)
    return header
