"""Drafts with Medusa heads for the whole batch at once: combinations of what each head finds likely, or chains.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", arXiv 2401.10774.
Its typical acceptance (§3.3) is not used, as it changes what is generated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq

import torch

from emssd.draft_models import GrowingRow, Shape, SlotDrafter
from emssd.model import BorrowedTarget
from emssd_heads import LAST_NORMED, Format, HeadFiles, Loaded, StatesDrafter, TargetSizes
from emssd_heads.residual import ResidualHeads, counted

__all__ = ["MedusaDrafter", "load_medusa"]

_PREFIX = re.compile(r"medusa_heads?\.")
_NAMES = {
    re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"): r"layers.\1.\2.linear.\3",
    re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"): r"layers.\1.\2.linear.\3",
    re.compile(r"(\d+)\.\d+\.weight"): r"projections.\1.weight",
    re.compile(r"lm_heads\.(\d+)\.weight"): r"projections.\1.weight",
}


class MedusaDrafter(SlotDrafter, StatesDrafter):
    """Drafts with heads that have no KV cache and read nothing but a hidden state.

    All heads guess from the target's last hidden state of the token before the newest one: the target chose the newest
    token from it. The head at 0 guesses the first drafted token. No head knows the guesses of the rest.
    """

    reads_all = False

    def __init__(self, heads: ResidualHeads, shape: Shape, target: BorrowedTarget) -> None:
        super().__init__(shape, (LAST_NORMED,), target)
        self._heads, self.target_ids = heads, heads.target_ids

    def slots(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        states = torch.cat([self._states[row.request_id].new(row.tree.num_tokens) for row in rows])
        logits = torch.stack([self._heads(head, states) for head in range(max(row.tree.depth for row in rows))])
        return torch.cat([logits[: row.tree.depth, index] for index, row in enumerate(rows)])


def load_medusa(path: str, target: TargetSizes) -> Loaded[ResidualHeads]:
    """Load heads of files of their own, within whole models, and in the names of vLLM.

    Weights tell the number of heads: published configs say 2 of files with 5.
    """
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
