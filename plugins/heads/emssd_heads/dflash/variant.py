"""The differences between block drafters: the values of their configs, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from emssd_heads import DecoderConfig, HeadFiles
from emssd_heads.files import reading_config

__all__ = ["Variant", "variant_of"]


class _Sizes(dict[str, torch.Size]):
    """Shapes of the tensors whose names begin with `part`, by the rest of their names.

    Raises:
        ConfigError: a shape is read that is not there.
    """

    def __init__(self, files: HeadFiles, part: str) -> None:
        shapes = ((name, files.checkpoint.tensors[old].shape) for name, old in files.names.items())
        super().__init__((name.removeprefix(part), shape) for name, shape in shapes if name.startswith(part))
        self._files, self._part = files, part

    def __missing__(self, name: str) -> torch.Size:
        raise self._files.cannot(f"of its weights, {self._part}{name} is missing")


@dataclass(frozen=True, slots=True)
class Variant:
    """One block drafter.

    Attributes:
        block_size: tokens of a block: the newest one of a row, and masks.
        layers: the target's hidden states that it reads, see `emssd_heads.LAST_NORMED`.
        causal: ``[num_layers]`` whether a token of the block sees those before it alone.
        from_anchor: whether slot ``i`` of a block is for the token after it, and not for its own.
        files: that it is read from.
        kind: by the name of its paper.
        top_k: the candidates that a DFlash2 drafter chooses among.
        num_passes: of an XPress drafter, how often it refines a block.
    """

    decoder: DecoderConfig
    block_size: int
    mask_token_id: int
    layers: tuple[int, ...]
    causal: tuple[bool, ...]
    from_anchor: bool
    embedding_scale: float
    draft_vocab_size: int
    files: HeadFiles
    kind: str
    top_k: int
    num_passes: int

    def sizes(self, part: str) -> Mapping[str, torch.Size]:
        """The shapes of the tensors whose names begin with `part`, by the rest of their names."""
        return _Sizes(self.files, part)

    @property
    def has_confidence(self) -> bool:
        """Whether a layer of its own tells how sure it is."""
        return "confidence_head.proj.weight" in self.files.names

    @property
    def confidence_reads_markov(self) -> bool:
        """Whether that layer also reads the Markov head."""
        return self.sizes("confidence_head.proj.")["weight"][-1] != self.decoder.hidden_size

    @property
    def num_drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1


def variant_of(files: HeadFiles) -> Variant:
    """Read the values, in the config's ``dflash_config`` or at its top, and check them against the target."""
    inner = files.config.get("dflash_config") or {}
    if not isinstance(inner, Mapping):
        raise files.cannot("its dflash_config is no object of JSON")
    both = {**files.config} | {name: value for name, value in inner.items() if value is not None}
    decoder = DecoderConfig.read(files.config, files.checkpoint.path)
    with reading_config(files.checkpoint.path):
        variant = _read(files, both, decoder)
    _check(files, variant, both)
    return variant


def _read(files: HeadFiles, values: Mapping[str, Any], decoder: DecoderConfig) -> Variant:
    if missing := [name for name in ("block_size", "mask_token_id") if values.get(name) is None]:
        raise files.cannot(f"its config.json has no {', '.join(missing)}")
    names, target = files.names, files.target
    ids = values.get("target_layer_ids") or _default_layers(decoder.num_layers, target.num_layers)
    causal = values.get("is_causal", values.get("causal"))  # by default, layers with sliding windows are
    is_dspark = values.get("projector_type") == "dspark" or "DSpark" in str(values.get("architectures"))
    kinds = {"candidate_selector": "DFlash2", "refiner_head": "XPress", "markov_head": "DSpark", "confidence": "DSpark"}
    return Variant(
        decoder=decoder,
        block_size=int(values["block_size"]),
        mask_token_id=int(values["mask_token_id"]),
        layers=tuple(int(number) + 1 for number in ids),  # the file numbers outputs of layers; -1: embeddings
        causal=tuple(window is not None if causal is None else bool(causal) for window in decoder.windows),
        from_anchor=bool(values.get("sample_from_anchor", is_dspark)),  # as DeepSpec's blocks all are
        embedding_scale=float(values.get("input_embedding_scale", 1.0)),
        draft_vocab_size=int(values.get("draft_vocab_size") or target.vocab_size),
        files=files,
        kind=next((kinds[part] for part in kinds if any(name.startswith(part) for name in names)), "DFlash"),
        top_k=int(values.get("selector_top_k", 16)),
        num_passes=int(values.get("num_jacobi_passes", 6)),
    )


def _default_layers(count: int, num_layers: int) -> list[int]:
    """The layers of the target that a drafter of `count` layers reads if its config names none."""
    if count == 1:
        return [num_layers // 2]
    return [round(1 + index * (num_layers - 4) / (count - 1)) for index in range(count)]


def _scaled(variant: Variant, values: Mapping[str, Any]) -> str | None:
    """The scale and the cap of logits, where they matter: the likeliest token is the same with any of them."""
    factor, cap = (values.get(name) for name in ("output_multiplier", "final_logit_softcapping"))
    scales = {"output_multiplier": None if factor == 1 else factor, "final_logit_softcapping": cap}
    named = ", ".join(f"{name} {value}" for name, value in scales.items() if value)
    return named if variant.kind != "DFlash" or (factor or 1) < 0 else None


def _check(files: HeadFiles, variant: Variant, values: Mapping[str, Any]) -> None:
    target = files.target
    size, vocab_size, num_layers = (values.get(name) for name in ("hidden_size", "vocab_size", "num_target_layers"))
    read = ", ".join(str(layer - 1) for layer in variant.layers)
    projection = {"gated": "gate_proj", "rnn": "joint_proj"}.get(str(values.get("markov_head_type")))
    files.check_sizes(size, vocab_size)
    if num_layers is not None and num_layers != target.num_layers:
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
    elif variant.has_confidence and variant.confidence_reads_markov and not variant.sizes("markov_head."):
        why = "its confidence head reads a Markov head, and it has none"
    elif projection and f"markov_head.{projection}.weight" not in files.names:
        why = f"of its weights, markov_head.{projection}.weight is missing"
    elif scaled := _scaled(variant, values):
        why = f"it scales its logits by {scaled}, and what its other parts add to them is of another scale"
    else:
        return
    raise files.cannot(why)
