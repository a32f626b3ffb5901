"""Loads layers for multi-token prediction in the layouts of DeepSeek-V3, GLM-4-MoE, Qwen3-Next and ``speculators``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from emssd.errors import EmssdError
from emssd_heads import LAST_NORMED, Format, HeadFiles, Loaded, TargetWeights
from emssd_heads.files import in_short, reading_config
from emssd_heads.mtp.head import MtpHead

__all__ = ["load_mtp"]

_OF_A_LAYER = re.compile(r"mtp\.layers\.(\d+)\.|(?:model\.)?layers\.(\d+)\.(?:enorm|hnorm|eh_proj)\.weight$")
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
_OF_MODULE = {"shared_head.norm.weight": "norm.weight", "shared_head.head.weight": "lm_head.weight"} | {
    name: name for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "embed_tokens.weight")
}
_OF_MTP = {
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.norm.weight": "norm.weight",
}
_WHOLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_EXACT = "e_score_correction_bias"  # which models keep in float32


def load_mtp(path: str, lent: TargetWeights) -> Loaded[MtpHead]:
    """Load a layer. Tables of embeddings and logits that are copies of the target's are not loaded again.

    Args:
        path: folder, file of weights or hub id of the target's checkpoint, or of one with the layer alone.
    """
    target, num_layers = lent.target, lent.sizes.num_layers
    files = HeadFiles.read(path, lent.sizes, Format.mtp, new_name=lambda name: _new_name(name, num_layers))
    with reading_config(path):
        _check(files, lent)
    tensors, names = files.checkpoint.tensors, files.names
    if odd := next((name for name in names.values() if tensors[name].dtype not in _WHOLE), None):
        raise files.cannot(f"its weights are quantized ({odd}), which drafter=mtp does not read")
    files.drop_copies(target.model)
    with _running_code(files, lent), torch.device("meta"):
        state = MtpHead(target.model, target.dtype, names, target.vocab_size).state_dict()
    _fuse_experts(files, state)
    head = files.filled(lambda: MtpHead(target.model, target.dtype, names, target.vocab_size))
    for name, buffer in head.named_buffers():
        if name.endswith(_EXACT):
            buffer.data = tensors[names[name]].to(target.device, torch.float32)
    with _running_code(files, lent):
        _ = head.specs  # the first pass
    layout = "Qwen3-Next" if names["eh_proj.weight"].startswith("mtp.") else "DeepSeek-V3 and GLM-4-MoE"
    described = (
        f"layer for multi-token prediction in the layout of {layout}, read from {files.checkpoint.source.name}",
        "reads the target's last hidden state, behind its final norm",
        head.described,
    )
    return Loaded(head, (LAST_NORMED,), described)


@contextmanager
def _running_code(files: HeadFiles, lent: TargetWeights) -> Iterator[None]:
    """For code of the target's classes, which may raise anything."""
    try:
        yield
    except EmssdError:
        raise
    except Exception as error:
        kind = type(lent.target.model.get_decoder().layers[-1]).__name__
        why = f"a further layer of the target's kind, {kind}, cannot be run ({in_short(error)})"
        raise files.cannot(why) from error


def _check(files: HeadFiles, lent: TargetWeights) -> None:
    sizes, decoder, tensors = files.target, lent.target.model.get_decoder(), files.checkpoint.tensors
    config = files.config.get("text_config") or files.config
    layers = {int(layer[1] or layer[2]) for name in tensors if (layer := _OF_A_LAYER.match(name))}
    kind = type(decoder.layers[-1]).__name__
    files.check_sizes(config.get("hidden_size"), config.get("vocab_size"))
    if len(layers) != 1:
        why = f"it has {len(layers)} layers for multi-token prediction; drafter=mtp drafts with exactly one"
    elif "mtp.fc.weight" not in tensors and layers != {sizes.num_layers}:
        why = f"its layer for multi-token prediction is number {min(layers)}; this target's would be {sizes.num_layers}"
    elif config.get("mtp_hidden_states_first"):
        why = "it puts hidden states before embeddings (mtp_hidden_states_first), which drafter=mtp does not do"
    elif any(spec.sliding_window is not None for spec in lent.spec.layers):
        why = "the target has layers with sliding windows, and no file says which its layer would have"
    elif not hasattr(decoder, "rotary_emb") or not hasattr(decoder.layers[-1], "input_layernorm"):
        why = f"layers of the target's kind, {kind}, have no rotary positions or no norm of their input"
    else:
        return
    raise files.cannot(why)


def _new_name(name: str, num_layers: int) -> str | None:
    """The head's name for a tensor; ``None`` for a tensor of the target itself."""
    if name in _OF_MTP:
        return _OF_MTP[name]
    if name.startswith("mtp."):
        return "block." + name.removeprefix("mtp.layers.0.")
    layer = _LAYER.fullmatch(name)
    if layer is None or int(layer[1]) != num_layers:
        return None
    return _OF_MODULE.get(layer[2], "block." + layer[2])


def _fuse_experts(files: HeadFiles, state: Mapping[str, torch.Tensor]) -> None:
    """Join the weights of all experts, where files have one for each and the `state` of the module has one for all."""
    names, tensors = files.names, dict(files.checkpoint.tensors)
    for fused in [name for name in state if name.endswith(".gate_up_proj") and name not in names]:
        prefix = fused.removesuffix("gate_up_proj")
        count, (size, wide) = len(state[fused]), state[f"{prefix}down_proj"].shape[1:]
        shapes = {"gate_proj": [(wide, size)], "up_proj": [(wide, size)], "down_proj": [(size, wide)]}
        parts = {part: [names.pop(f"{prefix}{i}.{part}.weight", "") for i in range(count)] for part in shapes}
        if missing := sum(not name for group in parts.values() for name in group):
            raise files.cannot(f"it should have {count} experts of three weights; {missing} lack")
        weights = {part: [tensors[name] for name in group] for part, group in parts.items()}
        stored = {part: sorted({tuple(weight.shape) for weight in group}) for part, group in weights.items()}
        if stored != shapes:
            raise files.cannot(f"its experts have weights of the shapes {stored} in place of {shapes}")
        gate_up = [torch.cat(pair) for pair in zip(weights["gate_proj"], weights["up_proj"], strict=True)]
        for name, group in ((fused, gate_up), (f"{prefix}down_proj", weights["down_proj"])):
            names[name], tensors[name] = name, torch.stack(group)
    files.checkpoint = replace(files.checkpoint, tensors=tensors)
