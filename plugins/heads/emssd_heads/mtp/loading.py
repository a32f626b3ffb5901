"""Loads layers for multi-token prediction in the layouts of DeepSeek-V3, GLM-4-MoE, Qwen3-Next and ``speculators``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from emssd.errors import EmssdError
from emssd_heads import LAST_NORMED, Format, HeadFiles, Loaded, TargetWeights
from emssd_heads.mtp.head import MtpHead

__all__ = ["load_mtp"]

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
_EXPERT = re.compile(r"(block\..*experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_WHOLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_EXACT = "e_score_correction_bias"  # which models keep in float32


def load_mtp(path: str, lent: TargetWeights) -> Loaded[MtpHead]:
    """Load a layer. Tables of embeddings and logits that are copies of the target's are not loaded again.

    Args:
        path: folder, file of weights or hub id of the target's checkpoint, or of one with the layer alone.
    """
    target, num_layers = lent.target, lent.sizes.num_layers
    files = HeadFiles.read(path, lent.sizes, Format.mtp, new_name=lambda name: _place(name, num_layers))
    with files.reading_config():
        _check(files, lent)
    tensors, names = files.checkpoint.tensors, files.names
    if odd := next((name for name in names.values() if tensors[name].dtype not in _WHOLE), None):
        raise files.cannot(f"its weights are quantized ({odd}), which drafter=mtp does not read")
    files.drop_copies(target.model)
    with _running_code(files, lent), torch.device("meta"):
        wanted = MtpHead(target.model, target.dtype, names, target.vocab_size).state_dict()
    _fuse_experts(files, wanted)
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
        said = " ".join(str(error).split())[:200].rstrip(" .")
        kind = type(lent.target.model.get_decoder().layers[-1]).__name__
        raise files.cannot(f"a further layer of the target's kind, {kind}, cannot be run ({said})") from error


def _check(files: HeadFiles, lent: TargetWeights) -> None:
    sizes, decoder, tensors = files.target, lent.target.model.get_decoder(), files.checkpoint.tensors
    config = files.config.get("text_config") or files.config
    layers = {int(found[1]) for name in tensors if (found := _LAYER.fullmatch(name)) and _is_mtp(found[2])}
    layers |= {int(found[1]) for name in tensors if (found := re.match(r"mtp\.layers\.(\d+)\.", name))}
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


def _is_mtp(rest: str) -> bool:
    return rest in ("enorm.weight", "hnorm.weight", "eh_proj.weight")


def _place(name: str, num_layers: int) -> str | None:
    """The head's name for a tensor; ``None`` for those of the target itself."""
    if name in _OF_MTP:
        return _OF_MTP[name]
    if name.startswith("mtp."):
        return "block." + name.removeprefix("mtp.layers.0.")
    found = _LAYER.fullmatch(name)
    if found is None or int(found[1]) != num_layers:
        return None
    return _OF_MODULE.get(found[2], "block." + found[2])


def _fuse_experts(files: HeadFiles, wanted: Mapping[str, torch.Tensor]) -> None:
    """Put weights of all experts into one tensor, where the target's code wants them so and files have one for each."""
    checkpoint, names = files.checkpoint, files.names
    found: dict[str, dict[str, dict[int, str]]] = {}
    for name in names:
        if (part := _EXPERT.fullmatch(name)) and f"{part[1]}.gate_up_proj" in wanted:
            found.setdefault(part[1], {}).setdefault(part[3], {})[int(part[2])] = name
    tensors, left = dict(checkpoint.tensors), dict(names)
    for place, parts in found.items():
        each = range(len(wanted[f"{place}.gate_up_proj"]))
        if any(sorted(parts.get(name, ())) != list(each) for name in ("gate_proj", "up_proj", "down_proj")):
            missing = len(each) * 3 - sum(index in each for part in parts.values() for index in part)
            raise files.cannot(f"it should have {len(each)} experts of three weights; {missing} lack")
        old = {part: [tensors[names[parts[part][index]]] for index in each] for part in parts}
        shapes = {part: sorted({tuple(tensor.shape) for tensor in group}) for part, group in old.items()}
        size, wide = wanted[f"{place}.down_proj"].shape[1:]
        right = {"gate_proj": [(wide, size)], "up_proj": [(wide, size)], "down_proj": [(size, wide)]}
        if shapes != right:
            raise files.cannot(f"its experts have weights of the shapes {shapes} in place of {right}")
        for numbered in parts.values():
            for name in numbered.values():
                del left[name]
        gate_up = [torch.cat(pair) for pair in zip(old["gate_proj"], old["up_proj"], strict=True)]
        for name, group in (("gate_up_proj", gate_up), ("down_proj", old["down_proj"])):
            left[f"{place}.{name}"] = f"{place}.{name}"
            tensors[f"{place}.{name}"] = torch.stack(group)
    files.checkpoint, files.names = replace(checkpoint, tensors=tensors), left
