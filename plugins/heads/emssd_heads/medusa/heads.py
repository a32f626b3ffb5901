"""`MedusaHeads`: from the hidden state of one token, a guess at each of the tokens that follow the next one.

They are read from files of heads alone, from whole models with heads in them, and in the names of vLLM.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", arXiv 2401.10774.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from emssd_heads import LAST_NORMED, Format, HeadFiles, Loaded, TargetSizes

__all__ = ["MedusaHeads", "load_medusa"]

_PREFIX = re.compile(r"medusa_heads?\.")
_LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_PROJECTION = re.compile(r"lm_heads\.(\d+)\.weight$")
_HEAD = re.compile(r"heads\.(\d+)\.(\d+)\.(linear\.)?weight$")


class MedusaHeads(nn.Module):
    """Medusa heads. They read the target's last hidden state, after its final norm, and have no KV cache."""

    def __init__(
        self, num_heads: int, num_layers: int, hidden_size: int, num_tokens: int, names: Container[str]
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(_Residual(hidden_size, f"heads.{h}.{layer}.linear.bias" in names) for layer in range(num_layers)),
                nn.Linear(hidden_size, num_tokens, bias=False),
            )
            for h in range(num_heads)
        )
        self.target_ids: torch.Tensor | None  # [num_tokens] the target's ids of the tokens that can be drafted
        self.register_buffer("target_ids", None, persistent=False)

    def forward(self, hidden: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """Logits ``[num_heads, n, num_tokens]`` of the tokens that follow the next one, the nearest at 0.

        `hidden` ``[n, hidden_size]`` are of the token that the target chose its next token from.
        """
        return torch.stack([head(hidden) for head in self.heads[:num_heads]])


class _Residual(nn.Module):
    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))


def load_medusa(path: str, target: TargetSizes) -> Loaded[MedusaHeads]:
    """Load heads. How many there are, the file says: published configs say 2 of files with 5."""
    files = HeadFiles.read(path, target, Format.medusa)
    if files.config.get("original_lm_head"):
        raise files.cannot("its heads share one vocabulary projection (original_lm_head), which is not supported")
    names = files.names = _names(files)
    num_heads, num_layers = _counted(files)
    ids, num_tokens = None, target.vocab_size
    if (token_map := names.pop("token_map", None)) is not None:
        ids = files.target_ids("token_map", files.checkpoint.tensors[token_map].long())
        num_tokens = len(ids)
    heads = files.filled(lambda: MedusaHeads(num_heads, num_layers, target.hidden_size, num_tokens, names))
    heads.target_ids = ids
    return Loaded(heads, (LAST_NORMED,), _described(files, heads, num_layers))


def _names(files: HeadFiles) -> dict[str, str]:
    """The tensors of the heads; a whole model's others are left alone."""
    within_model = any(_PREFIX.match(name) for name in files.checkpoint.tensors)

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

    names = files.renamed(new_name)
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


def _counted(files: HeadFiles) -> tuple[int, int]:
    """The number of heads, and of the layers of each before its projection."""
    projections = _places(files.names, linear=False)
    if not projections:
        raise files.cannot("none of its weights is the vocabulary projection of a head")
    return 1 + max(head for head, _ in projections), max(layer for _, layer in projections)


def _described(files: HeadFiles, heads: MedusaHeads, num_layers: int) -> tuple[str, ...]:
    said = files.config.get("medusa_num_heads", files.config.get("num_heads"))
    other = f" (its config says {said})" if said not in (None, len(heads.heads)) else ""
    mapped = "" if heads.target_ids is None else f", which draft {len(heads.target_ids)} tokens"
    return (
        f"{len(heads.heads)} Medusa heads{other} of {num_layers} residual layers{mapped}, read from "
        f"{files.checkpoint.source.name}",
        "reads the target's last hidden state, behind its final norm, of the token that its next token was chosen from",
    )
