"""`HydraHeads`: heads that also read the tokens drafted before theirs.

Those of the architectures ``mlp`` and ``prefix-mlp`` (Hydra++) are loaded.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", arXiv 2402.05109.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from emssd_heads import LAST_NORMED, DecoderConfig, Format, HeadFiles, LayerHead, Loaded, TargetSizes

__all__ = ["LoadedHydra", "load_hydra"]

_MLP = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(.+)$")
_PROJECTION = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)$")
_PREFIX = "prefix_embeding_layer."  # as the authors write it


class HydraHeads(nn.Module):
    """Heads of multi-layer perceptrons. A head runs once for each node of a tree that gets children."""

    def __init__(
        self, num_heads: int, num_layers: int, hidden_size: int, vocab_size: int, names: Container[str]
    ) -> None:
        super().__init__()
        self.mlp = nn.ModuleList(
            nn.Sequential(
                *(
                    _Residual(f"mlp.{h}.{layer}.", hidden_size * (1 if layer else h + 2), hidden_size, names)
                    for layer in range(num_layers)
                )
            )
            for h in range(num_heads)
        )
        self.projections = nn.ModuleList(
            nn.Linear(hidden_size, vocab_size, bias=f"projections.{h}.bias" in names) for h in range(num_heads)
        )

    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, vocab]`` of the children of n nodes of one level.

        Args:
            hidden: ``[n, hidden_size]``, of the token that the root was chosen from: the target's hidden state, or what
                the prefix layer of Hydra++ made of it.
            embeds: ``[n, h + 1, hidden_size]`` the target's embeddings of the tokens from the root to the node. Head
                `h` gives the logits, so that 0 is asked for the children of the root.
        """
        depth = embeds.shape[1] - 1
        inputs = torch.cat([hidden, embeds.flatten(1)], dim=-1)
        return cast("torch.Tensor", self.projections[depth](self.mlp[depth](inputs)))


class _Residual(nn.Module):
    """A layer that adds its input; where sizes differ, the input goes through a layer of its own."""

    def __init__(self, prefix: str, size: int, out: int, names: Container[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(size, out, bias=f"{prefix}linear.bias" in names)
        self.res_connection: nn.Module = nn.Identity()
        if size != out:
            self.res_connection = nn.Linear(size, out, bias=f"{prefix}res_connection.bias" in names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.res_connection(x) + F.silu(self.linear(x)))


@dataclass(frozen=True, slots=True)
class LoadedHydra(Loaded[HydraHeads]):
    """Heads; hidden states go through `prefix` first, or are read as they are."""

    prefix: LayerHead | None


def load_hydra(path: str, target: TargetSizes, target_config: Mapping[str, Any]) -> LoadedHydra:
    """Load heads. A prefix layer has the sizes of the target's layers, which its config tells."""
    files = HeadFiles.read(path, target, Format.hydra)
    layer = _layer(files)
    names = _names(files)
    own = {new: name for new, name in names.items() if not new.startswith(_PREFIX)}
    num_heads, num_layers = _counted(files, own)
    heads = files.filled(lambda: HydraHeads(num_heads, num_layers, target.hidden_size, target.vocab_size, own), own)
    prefix, rotary = None, list[str]()
    if files.config.get("hydra_head_arch") == "prefix-mlp" or len(own) < len(names):
        decoder = DecoderConfig.read({**target_config, "num_hidden_layers": 1}, path)
        rest = {new.removeprefix(_PREFIX): name for new, name in names.items() if new.startswith(_PREFIX)}
        prefix = files.filled(lambda: LayerHead(decoder, rest), rest)
        rotary.append(f"rotary base {decoder.rope['rope_theta']:g}, the target's")
    states = "last hidden state, behind its final norm" if layer < 0 else f"residual stream before layer {layer}"
    described = (
        f"{num_heads} Hydra heads of {num_layers} layers{' behind a prefix layer' if prefix is not None else ''}, "
        f"read from {files.checkpoint.source.name}",
        f"reads the target's {states}",
        *rotary,
    )
    return LoadedHydra(heads, (layer,), described, prefix)


def _layer(files: HeadFiles) -> int:
    """The hidden state that is read."""
    config, num_layers = files.config, files.target.num_layers
    kind = config.get("hydra_head_arch", "mlp")
    if kind not in ("mlp", "prefix-mlp"):
        raise files.cannot(f"its heads are of the architecture {kind!r}; supported are mlp and prefix-mlp")
    if config.get("grounded_heads") is False:
        raise files.cannot("its heads do not read drafted tokens (grounded_heads is false), which Medusa's do too")
    offset = config.get("hidden_state_offset") or 0
    if not isinstance(offset, int) or not 0 <= offset <= num_layers:
        raise files.cannot(f"its hidden_state_offset is {offset!r}, and the target has {num_layers} layers")
    return num_layers - offset if offset else LAST_NORMED


def _names(files: HeadFiles) -> dict[str, str]:
    """The tensors of the heads. Some layers have modules without weights between them, so that numbers have gaps."""
    numbers: dict[str, set[int]] = {}
    for name in files.checkpoint.tensors:
        if layer := _MLP.match(name):
            numbers.setdefault(layer[1], set()).add(int(layer[2]))

    def new_name(name: str) -> str | None:
        if layer := _MLP.match(name):
            place = sorted(numbers[layer[1]]).index(int(layer[2]))
            return f"mlp.{layer[1]}.{place}.{layer[3]}"
        if projection := _PROJECTION.match(name):
            return f"projections.{projection[1]}.{projection[2]}"
        return None if name == f"{_PREFIX}embed_tokens.weight" else name  # hidden states take the place of embeddings

    return files.renamed(new_name)


def _counted(files: HeadFiles, names: Mapping[str, str]) -> tuple[int, int]:
    """The number of heads, and of the layers of each."""
    layers = [name.split(".")[1:3] for name in names if name.startswith("mlp.")]
    if not layers:
        raise files.cannot("none of its weights is a layer of a head")
    return 1 + max(int(head) for head, _ in layers), 1 + max(int(layer) for _, layer in layers)
