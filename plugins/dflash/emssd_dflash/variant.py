"""What differs between block drafters: the values of their configs, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emssd.drafters import DecoderConfig, TargetSizes
from emssd.heads import Checkpoint
from emssd.heads.files import cannot_load, reading_config

__all__ = ["Variant", "variant_of"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One block drafter.

    Attributes:
        decoder: sizes and rules of its layers.
        block_size: tokens of a block: the newest one of a row, and masks.
        mask_token_id: of the target's embeddings.
        layers: the target's hidden states that it reads, see `emssd.heads.LAST_NORMED`.
        causal: ``[num_layers]`` whether a token of the block sees those before it alone.
        from_anchor: whether slot ``i`` of a block is for the token behind it, and not for its own.
        embedding_scale: factor of the embeddings of blocks.
        markov_rank: of the table of what follows which token; 0 without one, as in DFlash.
        has_confidence: whether a layer of its own tells how sure it is.
        confidence_reads_markov: whether that reads the table too.
    """

    decoder: DecoderConfig
    block_size: int
    mask_token_id: int
    layers: tuple[int, ...]
    causal: tuple[bool, ...]
    from_anchor: bool
    embedding_scale: float
    markov_rank: int
    has_confidence: bool
    confidence_reads_markov: bool

    @property
    def num_drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1


def variant_of(checkpoint: Checkpoint, names: Mapping[str, str], target: TargetSizes) -> Variant:
    """Read the values, in the config's ``dflash_config`` or at its top, and check them against the target.

    Args:
        checkpoint: a DFlash or DSpark drafter.
        names: of its tensors, by those of the module.
        target: that it is to draft for.

    Raises:
        ConfigError: it was trained for another target, or is of a kind that is not supported.
    """
    path, config = checkpoint.path, checkpoint.config
    if config.get("speculators_model_type") is not None:
        raise cannot_load(path, "it is in a container of speculators, which is not read for block drafters")
    if any(name.startswith("candidate_selector.") for name in names):
        raise cannot_load(path, "it is a DFlash2 drafter, whose convolutions and selector emssd does not have")
    inner = config.get("dflash_config") or {}
    if not isinstance(inner, Mapping):
        raise cannot_load(path, "its dflash_config is no object of JSON")
    both = {**config} | {name: value for name, value in inner.items() if value is not None}
    decoder = DecoderConfig.read(config, path)
    with reading_config(path):
        variant = _read(checkpoint, names, both, decoder, target)
    _check(checkpoint, variant, both, target)
    return variant


def _read(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    values: Mapping[str, Any],
    decoder: DecoderConfig,
    target: TargetSizes,
) -> Variant:
    if missing := [name for name in ("block_size", "mask_token_id") if values.get(name) is None]:
        raise cannot_load(checkpoint.path, f"its config.json has no {', '.join(missing)}")
    ids = values.get("target_layer_ids") or _spread(decoder.num_layers, target.num_layers)

    def width(name: str) -> int:
        return checkpoint.tensors[names[name]].shape[-1] if name in names else 0

    confidence = width("confidence_head.proj.weight")
    return Variant(
        decoder=decoder,
        block_size=int(values["block_size"]),
        mask_token_id=int(values["mask_token_id"]),
        layers=tuple(int(each) + 1 for each in ids),  # the file numbers outputs of layers; -1: embeddings
        causal=_causal(values, decoder),
        from_anchor=bool(values.get("sample_from_anchor", _is_dspark(values))),
        embedding_scale=float(values.get("input_embedding_scale", 1.0)),
        markov_rank=width("markov_head.markov_w1.weight"),
        has_confidence=bool(confidence),
        confidence_reads_markov=confidence not in (0, decoder.hidden_size),
    )


def _causal(values: Mapping[str, Any], decoder: DecoderConfig) -> tuple[bool, ...]:
    """Where the config does not say, layers with sliding windows are, and others are not."""
    told = values.get("is_causal", values.get("causal"))
    return tuple(window is not None if told is None else bool(told) for window in decoder.windows)


def _is_dspark(values: Mapping[str, Any]) -> bool:
    """Whether it is a DSpark drafter, with or without a Markov head. DeepSpec's blocks all begin at the anchor."""
    named = " ".join(map(str, values.get("architectures") or ()))
    return "DSpark" in named or values.get("projector_type") == "dspark"


def _spread(num_own: int, num_layers: int) -> list[int]:
    """Those of the target's layers that are read where the config names none."""
    if num_own == 1:
        return [num_layers // 2]
    return [round(1 + own * (num_layers - 4) / (num_own - 1)) for own in range(num_own)]


def _check(checkpoint: Checkpoint, variant: Variant, values: Mapping[str, Any], target: TargetSizes) -> None:
    size, vocab_size, num_layers = (values.get(name) for name in ("hidden_size", "vocab_size", "num_target_layers"))
    read = ", ".join(str(layer - 1) for layer in variant.layers)
    if vocab_size is not None and vocab_size != target.vocab_size:
        why = f"its vocabulary has {vocab_size} tokens, and the target's has {target.vocab_size}"
    elif size != target.hidden_size:
        why = f"it has a hidden size of {size}, and the target's embeddings are of size {target.hidden_size}"
    elif num_layers is not None and num_layers != target.num_layers:
        why = f"it was trained for a target of {num_layers} layers, and this one has {target.num_layers}"
    elif not all(0 <= layer <= target.num_layers for layer in variant.layers):
        why = f"it reads the outputs of layers {read}, and the target has layers 0 to {target.num_layers - 1}"
    elif len(set(variant.layers)) < len(variant.layers):
        why = f"it reads the outputs of layers {read}, and needs different ones"
    elif not 0 <= variant.mask_token_id < target.vocab_size:
        why = f"its mask_token_id is {variant.mask_token_id}, and the target has embeddings of {target.vocab_size} ids"
    elif not 1 <= variant.num_drafts <= 4096:  # as many as a tree has at most
        why = f"its block_size is {variant.block_size}; a block drafts 1 to 4096 tokens"
    elif values.get("use_swa") and not any(variant.decoder.windows):
        why = "its dflash_config has use_swa, and no layer_types say which layers have a sliding window"
    elif variant.markov_rank and values.get("markov_head_type", "vanilla") != "vanilla":
        why = f"its Markov head is of type {values['markov_head_type']}; supported is vanilla"
    elif variant.has_confidence and not variant.markov_rank:
        why = "it has a confidence head and no Markov head, and a DSpark drafter has both or the latter"
    else:
        return
    raise cannot_load(checkpoint.path, why)
