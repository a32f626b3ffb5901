"""Loads Medusa heads: files of heads alone, whole models with heads in them, and heads in the names of vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from emssd.heads import Checkpoint, Format, TargetSizes, expect, fill, made_empty, read_checkpoint, rename
from emssd.heads.files import cannot_load
from emssd_medusa.heads import MedusaHeads

__all__ = ["LoadedMedusa", "load_medusa"]

_PREFIX = re.compile(r"medusa_heads?\.")
_LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_PROJECTION = re.compile(r"lm_heads\.(\d+)\.weight$")
_HEAD = re.compile(r"heads\.(\d+)\.(\d+)\.(linear\.)?weight$")


@dataclass(frozen=True, slots=True)
class LoadedMedusa:
    """Heads, and how they are to be used.

    Attributes:
        heads: with their weights. They read the target's last hidden state, behind the final norm.
        described: the conventions that were chosen, a line each.
    """

    heads: MedusaHeads
    described: tuple[str, ...]


def load_medusa(path: str, target: TargetSizes, *, dtype: torch.dtype, device: torch.device) -> LoadedMedusa:
    """Load heads. How many there are, the file says: published configs say 2 of files with 5.

    Args:
        path: folder, file of weights or hub id.
        target: that they are to draft for.
        dtype, device: of the weights.

    Raises:
        ConfigError: these are no Medusa heads, or none for this target, or not whole.
        OutOfMemoryError: the device has no room for them.
    """
    checkpoint = read_checkpoint(path)
    expect(checkpoint, Format.medusa)
    if checkpoint.config.get("original_lm_head"):
        raise cannot_load(path, "its heads share one vocabulary projection (original_lm_head), which is not supported")
    names = _names(checkpoint)
    num_heads, num_layers = _counted(path, names)
    token_map = names.pop("token_map", None)
    num_tokens = target.vocab_size if token_map is None else len(checkpoint.tensors[token_map])
    heads = made_empty(lambda: MedusaHeads(num_heads, num_layers, target.hidden_size, num_tokens, names))
    fill(heads, checkpoint, names, dtype=dtype, device=device)
    if token_map is not None:
        heads.target_ids = _target_ids(checkpoint, checkpoint.tensors[token_map], target).to(device)
    return LoadedMedusa(heads, _described(checkpoint, heads, num_layers))


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """The tensors of the heads; a whole model's others are left alone."""
    within_model = any(_PREFIX.match(name) for name in checkpoint.tensors)

    def new_name(name: str) -> str | None:
        if within_model:
            if not _PREFIX.match(name):
                return None
            name = _PREFIX.sub("", name)
        if layer := _LAYER.match(name):
            return f"heads.{layer[1]}.{layer[2]}.linear.{layer[3]}"
        if projection := _PROJECTION.match(name):
            return f"heads.{projection[1]}.projection"
        return f"heads.{name}" if re.match(r"\d+\.", name) else name

    names = rename(checkpoint, new_name)
    layers = _places(names, linear=True)
    behind = 1 + max((layer for _, layer in layers), default=-1)  # in a head, its projection follows its layers
    return {
        f"heads.{new.split('.')[1]}.{behind}.weight" if new.endswith(".projection") else new: name
        for new, name in names.items()
    }


def _places(names: Iterable[str], *, linear: bool) -> set[tuple[int, int]]:
    """Head and layer of each weight, of those with `linear` in their name or of the others."""
    found = (_HEAD.match(name) for name in names)
    return {(int(each[1]), int(each[2])) for each in found if each and bool(each[3]) is linear}


def _counted(path: str, names: Iterable[str]) -> tuple[int, int]:
    """How many heads there are, and how many layers each has before its projection."""
    projections = _places(names, linear=False)
    if not projections:
        raise cannot_load(path, "none of its weights is the vocabulary projection of a head")
    return 1 + max(head for head, _ in projections), max(layer for _, layer in projections)


def _target_ids(checkpoint: Checkpoint, token_map: torch.Tensor, target: TargetSizes) -> torch.Tensor:
    ids = token_map.long()
    if ids.ndim != 1 or not ((ids >= 0) & (ids < target.vocab_size)).all() or len(set(ids.tolist())) < len(ids):
        raise cannot_load(
            checkpoint.path, f"its token_map names no different tokens of the target's {target.vocab_size}"
        )
    return ids


def _described(checkpoint: Checkpoint, heads: MedusaHeads, num_layers: int) -> tuple[str, ...]:
    config = checkpoint.config
    said = config.get("medusa_num_heads", config.get("num_heads"))
    other = f" (its config says {said})" if said not in (None, len(heads.heads)) else ""
    mapped = "" if heads.target_ids is None else f", which draft {len(heads.target_ids)} tokens"
    return (
        f"{len(heads.heads)} Medusa heads{other} of {num_layers} residual layers{mapped}, read from "
        f"{checkpoint.source.name}",
        "reads the target's last hidden state, behind its final norm, of the token that its next token was chosen from",
    )
