"""Models of any shape with random weights, whose greedy text is known: for timing without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from emssd.errors import ConfigError, did_you_mean

__all__ = ["counted_on", "counting_model"]

_SMALL, _LARGE = 0.005, 4.0  # standard deviations: of weights in layers, and of embeddings, which outweigh them
_PROJECTION = 0.02  # of the embeddings' size, so that logits stay in the range of half precision


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
