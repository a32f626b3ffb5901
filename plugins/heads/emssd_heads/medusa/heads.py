"""Loads Medusa heads from files of heads alone, from whole models with heads in them, and in the names of vLLM.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", arXiv 2401.10774.
"""

from __future__ import annotations

import re

from emssd_heads import LAST_NORMED, Format, HeadFiles, Loaded, TargetSizes
from emssd_heads.residual import ResidualHeads, counted

__all__ = ["load_medusa"]

_PREFIX = re.compile(r"medusa_heads?\.")
_NAMES = {
    re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"): r"layers.\1.\2.linear.\3",
    re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"): r"layers.\1.\2.linear.\3",
    re.compile(r"(\d+)\.\d+\.weight"): r"projections.\1.weight",
    re.compile(r"lm_heads\.(\d+)\.weight"): r"projections.\1.weight",
}


def load_medusa(path: str, target: TargetSizes) -> Loaded[ResidualHeads]:
    """Load heads. How many there are, the file says: published configs say 2 of files with 5."""
    files = HeadFiles.read(path, target, Format.medusa)
    if files.config.get("original_lm_head"):
        raise files.cannot("its heads share one vocabulary projection (original_lm_head), which is not supported")
    within_model = any(_PREFIX.match(name) for name in files.checkpoint.tensors)

    def new_name(name: str) -> str | None:
        if within_model and not _PREFIX.match(name):
            return None  # the rest of a whole model
        name = _PREFIX.sub("", name, count=1)
        pattern = next((pattern for pattern in _NAMES if pattern.fullmatch(name)), None)
        return name if pattern is None else pattern.sub(_NAMES[pattern], name)

    names = files.names = files.renamed(new_name)
    num_heads, num_layers = counted(files, names)
    ids, num_tokens = None, target.vocab_size
    if (token_map := names.pop("token_map", None)) is not None:
        ids = files.target_ids("token_map", files.checkpoint.tensors[token_map].long())
        num_tokens = len(ids)
    size = target.hidden_size
    heads = files.filled(lambda: ResidualHeads([size] * num_heads, num_layers, size, num_tokens, names))
    heads.target_ids = ids
    claimed = files.config.get("medusa_num_heads", files.config.get("num_heads"))
    other = f" (its config says {claimed})" if claimed not in (None, num_heads) else ""
    mapped = "" if ids is None else f", which draft {num_tokens} tokens"
    described = (
        f"{num_heads} Medusa heads{other} of {num_layers} residual layers{mapped}, read from "
        f"{files.checkpoint.source.name}",
        "reads the target's last hidden state, behind its final norm, of the token that its next token was chosen from",
    )
    return Loaded(heads, (LAST_NORMED,), described)
