"""Loads EAGLE-3 heads of the original repository, of SpecForge and SGLang, and of the container of ``speculators``."""

from __future__ import annotations

import re

from emssd_heads import LAST_NORMED, Format, HeadFiles, Loaded, TargetSizes
from emssd_heads.eagle3 import LayerIds
from emssd_heads.eagle3.head import Eagle3Head
from emssd_heads.eagle3.variant import Variant, variant_of

__all__ = ["load_eagle3"]

_OLD_NORMS = {
    f"aux_norm_{name}.weight": f"fc_norm.{number}.weight" for number, name in enumerate(("low", "mid", "high"))
}
_LATER_NORM = re.compile(r"(layers\.[1-9]\d*\.)hidden_norm\.weight$")


def load_eagle3(path: str, target: TargetSizes, layer_ids: LayerIds = LayerIds.auto) -> Loaded[Eagle3Head]:
    """Load a head; `layer_ids` says what the numbers of layers in its config mean."""
    files = HeadFiles.read(path, target, Format.eagle3, Format.peagle, new_name=_new_name)
    names = files.names
    if files.config.get("tie_word_embeddings") and "d2t" not in names and "embed_tokens.weight" in names:
        names.setdefault("lm_head.weight", names["embed_tokens.weight"])
    with files.reading_config():
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
