"""Loads Hydra heads of the architectures ``mlp`` and ``prefix-mlp`` (Hydra++)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from emssd.heads import (
    LAST_NORMED,
    Checkpoint,
    DecoderConfig,
    Format,
    TargetSizes,
    expect,
    fill,
    made_empty,
    read_checkpoint,
)
from emssd.heads.files import cannot_load
from emssd.heads.weights import rename
from emssd_hydra.heads import HydraHeads, HydraPrefix

__all__ = ["LoadedHydra", "load_hydra"]

_MLP = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(.+)$")
_PROJECTION = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)$")
_PREFIX = "prefix_embeding_layer."  # as the authors write it


@dataclass(frozen=True, slots=True)
class LoadedHydra:
    """Heads, and how they are to be used.

    Attributes:
        heads: with their weights.
        prefix: what the hidden states go through first; ``None`` if the heads read them as they are.
        layer: the target's hidden state that is read, see `emssd.heads.LAST_NORMED`.
        described: the conventions that were chosen, a line each.
    """

    heads: HydraHeads
    prefix: HydraPrefix | None
    layer: int
    described: tuple[str, ...]


def load_hydra(
    path: str,
    target: TargetSizes,
    target_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedHydra:
    """Load heads.

    Args:
        path: folder, file of weights or hub id.
        target: that they are to draft for.
        target_config: values of the target's config. A prefix layer has the sizes of the target's layers.
        dtype, device: of the weights.

    Raises:
        ConfigError: these are no Hydra heads, or none for this target, or of another architecture, or not whole.
        OutOfMemoryError: the device has no room for them.
    """
    checkpoint = read_checkpoint(path)
    expect(checkpoint, Format.hydra)
    config = checkpoint.config
    layer = _layer(checkpoint, target)
    names = _names(checkpoint)
    num_heads, num_layers = _counted(path, names)
    own = {new: name for new, name in names.items() if not new.startswith(_PREFIX)}
    heads = made_empty(lambda: HydraHeads(num_heads, num_layers, target.hidden_size, target.vocab_size, own))
    fill(heads, checkpoint, own, dtype=dtype, device=device)
    prefix, rotary = None, list[str]()
    if config.get("hydra_head_arch") == "prefix-mlp" or len(own) < len(names):
        decoder = DecoderConfig.read({**target_config, "num_hidden_layers": 1}, path)
        rest = {new.removeprefix(_PREFIX): name for new, name in names.items() if new.startswith(_PREFIX)}
        prefix = made_empty(lambda: HydraPrefix(decoder, rest))
        fill(prefix, checkpoint, rest, dtype=dtype, device=device)
        rotary.append(f"rotary base {decoder.rope['rope_theta']:g}, the target's")
    states = "last hidden state, behind its final norm" if layer < 0 else f"residual stream before layer {layer}"
    described = (
        f"{num_heads} Hydra heads of {num_layers} layers{' behind a prefix layer' if prefix is not None else ''}, "
        f"read from {checkpoint.source.name}",
        f"reads the target's {states}",
        *rotary,
    )
    return LoadedHydra(heads, prefix, layer, described)


def _layer(checkpoint: Checkpoint, target: TargetSizes) -> int:
    """Which hidden state is read."""
    config, path = checkpoint.config, checkpoint.path
    kind = config.get("hydra_head_arch", "mlp")
    if kind not in ("mlp", "prefix-mlp"):
        raise cannot_load(path, f"its heads are of the architecture {kind!r}; supported are mlp and prefix-mlp")
    if config.get("grounded_heads") is False:
        raise cannot_load(path, "its heads do not read drafted tokens (grounded_heads is false), which Medusa's do too")
    offset = config.get("hidden_state_offset") or 0
    if not isinstance(offset, int) or not 0 <= offset <= target.num_layers:
        raise cannot_load(path, f"its hidden_state_offset is {offset!r}, and the target has {target.num_layers} layers")
    return target.num_layers - offset if offset else LAST_NORMED


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """The tensors of the heads. Some layers have modules without weights between them, so that numbers have gaps."""
    numbers: dict[str, set[int]] = {}
    for name in checkpoint.tensors:
        if layer := _MLP.match(name):
            numbers.setdefault(layer[1], set()).add(int(layer[2]))

    def new_name(name: str) -> str | None:
        if layer := _MLP.match(name):
            place = sorted(numbers[layer[1]]).index(int(layer[2]))
            return f"mlp.{layer[1]}.{place}.{layer[3]}"
        if projection := _PROJECTION.match(name):
            return f"projections.{projection[1]}.{projection[2]}"
        return None if name == f"{_PREFIX}embed_tokens.weight" else name  # hidden states take the place of embeddings

    return rename(checkpoint, new_name)


def _counted(path: str, names: Mapping[str, str]) -> tuple[int, int]:
    """How many heads there are, and how many layers each has."""
    layers = [name.split(".")[1:3] for name in names if name.startswith("mlp.")]
    if not layers:
        raise cannot_load(path, "none of its weights is a layer of a head")
    return 1 + max(int(head) for head, _ in layers), 1 + max(int(layer) for _, layer in layers)
