"""Loads Medusa heads: files of heads alone, whole models with heads in them, and heads in the names of vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterable

from emssd.drafters import LAST_NORMED, Format, HeadFiles, Loaded, TargetSizes
from emssd_medusa.heads import MedusaHeads

__all__ = ["load_medusa"]

_PREFIX = re.compile(r"medusa_heads?\.")
_LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_PROJECTION = re.compile(r"lm_heads\.(\d+)\.weight$")
_HEAD = re.compile(r"heads\.(\d+)\.(\d+)\.(linear\.)?weight$")


def load_medusa(path: str, target: TargetSizes) -> Loaded[MedusaHeads]:
    """Load heads. How many there are, the file says: published configs say 2 of files with 5. Raises ConfigError: these
    are no Medusa heads, or none for this target, or not whole; or OutOfMemoryError: the device has no room for them.
    """
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
