"""A new EAGLE-3 head for a target, and the files that it is saved in: a container of ``speculators``."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from emssd_eagle3.head import Eagle3Head
from emssd_eagle3.variant import variant_of
from torch import nn

from emssd.drafters.heads.files import Checkpoint
from emssd.drafters.heads.formats import unwrapped
from emssd.drafters.heads.loading import HeadFiles
from emssd.drafters.heads.target import TargetSizes
from emssd.errors import ConfigError
from emssd.model import TargetModel
from emssd_train.options import Eagle3Options
from emssd_train.saving import save_files

__all__ = ["check_layers", "default_layers", "head_config", "new_head", "save_head"]

_FORMAT = "0.9.0"  # the version of speculators whose format is written
_ROPE_THETA = 10000.0
_INITIAL = 0.02  # standard deviation of new weights


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The hidden states that a head reads: those of EAGLE-3's authors; in a shallow target, others.

    Args:
        num_layers: of the target.
    """
    authors = (2, num_layers // 2, num_layers - 3)
    if authors[0] < authors[1] < authors[2]:
        return authors
    spread = (1, (num_layers + 1) // 2, num_layers)
    return spread if len(set(spread)) == 3 else tuple(range(max(num_layers - 2, 0), num_layers + 1))


def check_layers(layers: Seq[int], target: TargetModel) -> None:
    """Hold the hidden states that a head is to read to those that `target` has.

    Raises:
        ConfigError: there are no such layers, or its embeddings are narrower than its hidden states.
    """
    num_layers, size = len(target.layers), target.model.config.get_text_config().hidden_size
    if len(set(layers)) < len(layers) or not all(0 <= layer <= num_layers for layer in layers):
        raise ConfigError(
            f"--hidden-layers is {','.join(map(str, layers))}; it must be different numbers from 0, what the first "
            f"layer gets, to {num_layers}, what the last one gives"
        )
    width = target.model.get_input_embeddings().weight.shape[1]
    if width != size:
        raise ConfigError(f"the target's embeddings have {width} elements, and its hidden states {size}")


def head_config(options: Eagle3Options, target: TargetModel, layers: Seq[int]) -> dict[str, Any]:
    """The ``config.json`` of a head that reads `layers` of `target`.

    Raises:
        ConfigError: its sizes do not go together.
    """
    from transformers import LlamaConfig

    text = target.model.config.get_text_config()
    num_heads = options.num_heads or text.num_attention_heads
    num_kv_heads = options.num_kv_heads or num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(f"--num-kv-heads is {num_kv_heads}; it must divide the head's {num_heads} attention heads")
    wide = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * text.hidden_size
    decoder = {
        "vocab_size": target.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": options.intermediate_size or wide,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": target.layers[0].key_dim,
        "max_position_embeddings": target.max_model_len,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_THETA},
    }
    try:
        values = LlamaConfig(**decoder).to_diff_dict()
    except Exception as error:  # Transformers checks values with errors of several libraries
        said = " ".join(str(error).split())[:200].rstrip(" .")
        raise ConfigError(f"a head of these sizes cannot be: {said}") from error
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _FORMAT,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": options.depth}],
            "verifier": {"name_or_path": options.model, "architectures": [type(target.model).__name__]},
        },
        "transformer_layer_config": values | {"model_type": "llama"},
        "draft_vocab_size": min(options.draft_vocab_size or target.vocab_size, target.vocab_size),
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "tie_word_embeddings": False,
    }


def new_head(
    config: Mapping[str, Any], target: TargetModel, drafted: Seq[int] | None, options: Eagle3Options
) -> Eagle3Head:
    """A head with random weights, in float32 or wider. Its vocabulary projection begins as that of the target.

    Args:
        config: see `head_config`.
        target: that it is to draft for.
        drafted: the target's ids of the tokens that it drafts; ``None`` for all.
        options: the seed, and whether it has a vocabulary projection.

    Raises:
        ConfigError: its sizes do not go together.
    """
    size, num_layers = (
        config["transformer_layer_config"]["hidden_size"],
        len(config["eagle_aux_hidden_state_layer_ids"]),
    )
    sizes = TargetSizes(target.vocab_size, size, len(target.layers))
    names = {name: name for name in ("fc.weight", *([] if options.share_lm_head else ["lm_head.weight"]))}
    names |= {} if drafted is None else {"d2t": "d2t"}
    shapes = {"fc.weight": torch.empty(size, num_layers * size, device="meta")}
    checkpoint = unwrapped(Checkpoint(options.output, Path(options.output), config, shapes))
    variant = variant_of(HeadFiles(checkpoint, sizes, names))
    head = Eagle3Head(variant, names, sizes).to(torch.promote_types(target.dtype, torch.float32))
    generator = torch.Generator().manual_seed(options.seed)
    for name, weight in head.named_parameters():
        if "norm" in name:
            nn.init.ones_(weight)
        else:
            nn.init.normal_(weight, std=_INITIAL, generator=generator)
    if drafted is not None:
        head.target_ids = torch.tensor(drafted)
    if head.lm_head is not None:
        rows = target.model.get_output_embeddings().weight.detach().cpu()
        with torch.no_grad():
            head.lm_head.weight.copy_(rows if drafted is None else rows[head.target_ids])
    return head.to(target.device)


def save_head(folder: Path, head: Eagle3Head, config: Mapping[str, Any], vocab_size: int, dtype: torch.dtype) -> None:
    """Write ``config.json`` and ``model.safetensors``, each whole or not at all.

    Args:
        folder: for the files.
        head: whose weights are saved.
        config: see `head_config`.
        vocab_size: of the target.
        dtype: of the weights.

    Raises:
        OutputError: they cannot be written.
    """
    weights = {name: each.detach().to("cpu", dtype).contiguous() for name, each in head.state_dict().items()}
    if head.target_ids is not None:
        ids = head.target_ids.cpu()
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    save_files(folder, config, weights)
