"""Loads Hydra heads of the architectures ``mlp`` and ``prefix-mlp`` (Hydra++).

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", arXiv 2402.05109.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from emssd_heads import LAST_NORMED, DecoderConfig, Format, HeadFiles, LayerHead, Loaded, TargetSizes
from emssd_heads.residual import ResidualHeads, counted

__all__ = ["load_hydra"]

_MLP = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(.+)$")
_PROJECTION = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)$")
_PREFIX = "prefix_embeding_layer."  # as the authors write it


def load_hydra(path: str, target: TargetSizes, target_config: Mapping[str, Any]) -> Loaded[ResidualHeads]:
    """Load heads. A prefix layer has the sizes of the target's layers, which its config tells.

    The head for level `h` of a draft reads a hidden state and the embeddings of the ``h + 1`` tokens before.
    """
    files = HeadFiles.read(path, target, Format.hydra)
    layer = _layer(files)
    names = _names(files)
    of_heads = {new: name for new, name in names.items() if not new.startswith(_PREFIX)}
    num_heads, num_layers = counted(files, of_heads)
    size, vocab_size = target.hidden_size, target.vocab_size
    reads = [(head + 2) * size for head in range(num_heads)]
    heads = files.filled(lambda: ResidualHeads(reads, num_layers, size, vocab_size, of_heads), of_heads)
    prefix, rotary = None, list[str]()
    if files.config.get("hydra_head_arch") == "prefix-mlp" or len(of_heads) < len(names):
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
    return Loaded(heads, (layer,), described, prefix)


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
            index = sorted(numbers[layer[1]]).index(int(layer[2]))
            return f"layers.{layer[1]}.{index}.{layer[3]}"
        if projection := _PROJECTION.match(name):
            return f"projections.{projection[1]}.{projection[2]}"
        return None if name == f"{_PREFIX}embed_tokens.weight" else name  # hidden states take the place of embeddings

    return files.renamed(new_name)
