"""The differences between block drafters: the values of their configs, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from emssd_heads import DecoderConfig, HeadFiles

__all__ = ["Variant", "variant_of"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One block drafter.

    Attributes:
        block_size: tokens of a block: the newest one of a row, and masks.
        layers: the target's hidden states that it reads, see `emssd_heads.LAST_NORMED`.
        causal: ``[num_layers]`` whether a token of the block sees those before it alone.
        from_anchor: whether slot ``i`` of a block is for the token after it, and not for its own.
        shapes: of all its tensors, by name.
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
    shapes: Mapping[str, torch.Size]
    kind: str
    top_k: int
    num_passes: int

    def sizes(self, part: str) -> dict[str, torch.Size]:
        """The shapes of the tensors whose names begin with `part`, by the rest of their names."""
        return {name.removeprefix(part): each for name, each in self.shapes.items() if name.startswith(part)}

    @property
    def has_confidence(self) -> bool:
        """Whether a layer of its own tells how sure it is."""
        return "confidence_head.proj.weight" in self.shapes

    @property
    def confidence_reads_markov(self) -> bool:
        """Whether that reads the table of what follows which token, too."""
        return self.shapes["confidence_head.proj.weight"][-1] != self.decoder.hidden_size

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
    with files.reading_config():
        variant = _read(files, both, decoder)
    _check(files, variant, both)
    return variant


def _read(files: HeadFiles, values: Mapping[str, Any], decoder: DecoderConfig) -> Variant:
    if missing := [name for name in ("block_size", "mask_token_id") if values.get(name) is None]:
        raise files.cannot(f"its config.json has no {', '.join(missing)}")
    names, target = files.names, files.target
    ids = values.get("target_layer_ids") or _spread(decoder.num_layers, target.num_layers)

    kinds = {"candidate_selector": "DFlash2", "refiner_head": "XPress", "markov_head": "DSpark", "confidence": "DSpark"}
    return Variant(
        decoder=decoder,
        block_size=int(values["block_size"]),
        mask_token_id=int(values["mask_token_id"]),
        layers=tuple(int(each) + 1 for each in ids),  # the file numbers outputs of layers; -1: embeddings
        causal=_causal(values, decoder),
        from_anchor=bool(values.get("sample_from_anchor", _is_dspark(values))),
        embedding_scale=float(values.get("input_embedding_scale", 1.0)),
        draft_vocab_size=int(values.get("draft_vocab_size") or target.vocab_size),
        shapes={name: files.checkpoint.tensors[old].shape for name, old in names.items()},
        kind=next((kinds[part] for part in kinds if any(name.startswith(part) for name in names)), "DFlash"),
        top_k=int(values.get("selector_top_k", 16)),
        num_passes=int(values.get("num_jacobi_passes", 6)),
    )


def _causal(values: Mapping[str, Any], decoder: DecoderConfig) -> tuple[bool, ...]:
    """Return whether a layer is causal. By default, layers with sliding windows are, and others are not."""
    told = values.get("is_causal", values.get("causal"))
    return tuple(window is not None if told is None else bool(told) for window in decoder.windows)


def _is_dspark(values: Mapping[str, Any]) -> bool:
    """Whether it is a DSpark drafter, with or without a Markov head. DeepSpec's blocks all begin at the anchor."""
    named = " ".join(map(str, values.get("architectures") or ()))
    return "DSpark" in named or values.get("projector_type") == "dspark"


def _spread(num_own: int, num_layers: int) -> list[int]:
    """The layers of the target that are read where the config names none."""
    if num_own == 1:
        return [num_layers // 2]
    return [round(1 + own * (num_layers - 4) / (num_own - 1)) for own in range(num_own)]


_PARTS = {
    "markov_head.": ("markov_w1.weight", "markov_w2.weight"),
    "candidate_selector.": ("predecessor_codebook", "successor_codebook", "hidden_projection.weight"),
    "refiner_head.": (
        *(f"{name}.weight" for name in ("token_embed", "down_h", "down_g", "in_proj", "readout")),
        *(f"mlp_{name}.weight" for name in ("gate", "up", "down")),
        "mix_l",
    ),
}


def _lacking(variant: Variant, markov_kind: str | None) -> list[str]:
    more = {"gated": ("gate_proj.weight",), "rnn": ("joint_proj.weight",)}.get(markov_kind or "", ())
    parts = _PARTS | {"markov_head.": (*_PARTS["markov_head."], *more)}
    for layer in range(variant.decoder.num_layers):
        for name in ("attention_conv", "mlp_conv"):
            parts[f"layers.{layer}.{name}."] = ("base_kernel", "kernel_projection.weight")
    found = ((part, names, variant.sizes(part)) for part, names in parts.items())
    return [part + name for part, names, own in found if own for name in names if name not in own]


def _scaled(variant: Variant, values: Mapping[str, Any]) -> str | None:
    """The scale and the cap of logits, where they matter: the likeliest token is the same with any of them."""
    factor, cap = (values.get(name) for name in ("output_multiplier", "final_logit_softcapping"))
    given = {"output_multiplier": factor not in (None, 1) and factor, "final_logit_softcapping": cap}
    said = ", ".join(f"{name} {value}" for name, value in given.items() if value)
    return said if variant.kind != "DFlash" or (factor or 1) < 0 else None


def _check(files: HeadFiles, variant: Variant, values: Mapping[str, Any]) -> None:
    target = files.target
    size, vocab_size, num_layers = (values.get(name) for name in ("hidden_size", "vocab_size", "num_target_layers"))
    read = ", ".join(str(layer - 1) for layer in variant.layers)
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
    elif lacking := _lacking(variant, values.get("markov_head_type")):
        why = f"of its weights, {', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing"
    elif scaled := _scaled(variant, values):
        why = f"it scales its logits by {scaled}, and what its other parts add to them is of another scale"
    else:
        return
    raise files.cannot(why)
