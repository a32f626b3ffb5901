"""Loads EAGLE-3 heads of the original repository, of SpecForge and SGLang, and of the container of ``speculators``.

`ParallelDrafter` drafts all levels in one pass, with a head that was trained for that (P-EAGLE).
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from typing import cast

import torch

from emssd.draft_models import GrowingRow, SlotDrafter
from emssd_heads import LAST_NORMED, Format, HeadFiles, Loaded, PairedDrafter, TargetSizes
from emssd_heads.eagle3 import LayerIds
from emssd_heads.eagle3.head import Eagle3Head
from emssd_heads.eagle3.variant import Variant, variant_of
from emssd_heads.files import reading_config

__all__ = ["ParallelDrafter", "load_eagle3"]

_OLD_NORMS = {
    f"aux_norm_{name}.weight": f"fc_norm.{number}.weight" for number, name in enumerate(("low", "mid", "high"))
}
_LATER_NORM = re.compile(r"(layers\.[1-9]\d*\.)hidden_norm\.weight$")


class ParallelDrafter(SlotDrafter, PairedDrafter):
    """Drafts with a head for which a mask stands in the place of each token that is drafted.

    After the pairs of a row, the head reads as many masks as the draft has further levels, in the same pass. The
    output at the n-th is for all nodes of level ``n + 1``.
    """

    def slots(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        head = cast("Eagle3Head", self._head)
        packed, features = self.pack_new(rows, (head.mask_token_id or 0, head.mask_feature()))
        logits = self._run(packed, self._inputs(packed.input_ids, features))
        self._have_used(rows)
        return logits


def load_eagle3(path: str, target: TargetSizes, layer_ids: LayerIds = LayerIds.auto) -> Loaded[Eagle3Head]:
    """Load a head; `layer_ids` says what the numbers of layers in its config mean."""
    files = HeadFiles.read(path, target, Format.eagle3, Format.peagle, new_name=_new_name)
    names = files.names
    if files.config.get("tie_word_embeddings") and "d2t" not in names and "embed_tokens.weight" in names:
        names.setdefault("lm_head.weight", names["embed_tokens.weight"])
    with reading_config(path):
        variant = variant_of(files, layer_ids)
    if not variant.num_features:
        for name in ("fc.weight", "fc.bias"):
            names.pop(name, None)
    head = files.filled(lambda: Eagle3Head(variant, names, target))
    head.target_ids = files.drafted_ids(variant.draft_vocab_size)
    return Loaded(head, variant.layers, _described(files, variant, head))


def _new_name(name: str) -> str:
    """One name for what trainers call by several: that of ``speculators``."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    if later := _LATER_NORM.match(name):
        return f"{later[1]}input_layernorm.weight"
    return _OLD_NORMS.get(name, name)


def _described(files: HeadFiles, variant: Variant, head: Eagle3Head) -> tuple[str, ...]:
    container, version = "in a folder of its own", files.config.get("speculators_version", "of an unknown version")
    if "speculators_model_type" in files.config:
        container = f"in a container of speculators {version}"
    flags = [
        name for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(variant, name)
    ]
    states = f"residual streams before layers {', '.join(map(str, variant.layers))}"
    if variant.layers == (LAST_NORMED,):
        states = "the target's last hidden state, behind its final norm"
    kind = "EAGLE-3 head" if head.mask_token_id is None else "EAGLE-3 head that drafts in parallel (P-EAGLE),"
    return (
        f"{kind} {container}, read from {files.checkpoint.source.name}",
        f"reads {states} ({variant.why})",
        f"options {', '.join(flags) or 'none'}",
        variant.decoder.described,
        f"{head.described}, {variant.draft_vocab_size} tokens can be drafted",
    )
