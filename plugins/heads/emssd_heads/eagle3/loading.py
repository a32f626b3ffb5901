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
    if tied := _tied_head(files):
        names["lm_head.weight"] = tied
    with files.reading_config():
        variant = variant_of(files, layer_ids)
    unused = ("d2t", "t2d") if variant.num_features else ("d2t", "t2d", "fc.weight", "fc.bias")
    placed = {new: name for new, name in names.items() if new not in unused}
    head = files.filled(lambda: Eagle3Head(variant, names, target), placed)
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


def _tied_head(files: HeadFiles) -> str | None:
    """The embeddings, if they are the head's own and its vocabulary projection too."""
    is_tied = files.config.get("tie_word_embeddings") and "lm_head.weight" not in files.names
    return files.names.get("embed_tokens.weight") if is_tied and "d2t" not in files.names else None


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
