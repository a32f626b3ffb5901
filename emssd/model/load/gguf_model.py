"""Models of GGUF files: config and tokenizer are converted once and kept; weights stay packed as the file has them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emssd.errors import ConfigError
from emssd.model.load.gguf_blocks import KINDS, rounded_of
from emssd.model.load.gguf_header import Header, Stored, read_header
from emssd.native import entry

__all__ = ["config_folder", "load_packed", "tokenizer_folder"]

_DENSE = "model.weights=dense loads such a file, in the memory of a dense model"
_NEEDS = "a GGUF file needs the package gguf; pip install 'emssd[gguf]'"


def config_folder(file: Path) -> Path:
    """A folder of the cache with the config.json that Transformers makes of the file's header."""
    from transformers import AutoConfig

    def write(folder: Path) -> None:
        AutoConfig.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)

    return _converted(file, "config", write)


def tokenizer_folder(file: Path) -> Path:
    """The same with the tokenizer."""
    from transformers import AutoTokenizer

    def write(folder: Path) -> None:
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)

    return _converted(file, "tokenizer", write)


def _converted(file: Path, part: str, write: Callable[[Path], None]) -> Path:
    header = read_header(file)
    _check_architecture(file, header.architecture)

    def convert(folder: Path) -> None:
        logging.getLogger("emssd").warning(
            "converting the %s of %s, once; a large vocabulary takes a minute or two …", part, file.name
        )
        write(folder)

    return entry(f"gguf-{part}", header.digest, convert).folder


def load_packed(file: Path, config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model of a file, with packed linear layers and embeddings, and Transformers' report on its loading.

    A tensor that is no matrix of blocks, or that Transformers converts by more than an order of rows, is made dense.

    Raises:
        ConfigError: a tensor of a type that cannot be packed, or an architecture with names that are not known.
    """
    import gguf
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    header, model_class = read_header(file), MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        skeleton = model_class(config)
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    names = get_gguf_hf_weights_map(skeleton, processor)
    modules, packed, state = dict(skeleton.named_modules()), dict[str, Any](), dict[str, torch.Tensor]()
    for stored in header.tensors:
        kind = gguf.GGMLQuantizationType(stored.kind)
        blocks = _blocks(file, header, stored, gguf.GGML_QUANT_SIZES[kind])
        name = names.get(stored.name, "")
        module = modules.get(name.removesuffix(".weight"))
    return None, None
