"""Plugin `drafter=mtp`: the target's own layer for multi-token prediction drafts from its last hidden state.

DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, §2.2; GLM-4.5 and Qwen3-Next have such layers, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from emssd.drafting import Drafter, DrafterContext
from emssd.errors import ConfigError
from emssd.errors.ranges import AtLeastOne
from emssd.hooks import DrafterSpec, offering
from emssd_heads import PairedDrafter, TargetWeights, TreeKind, TreeOptions, shape_of

__all__ = ["MtpConfig"]


@dataclass
class MtpConfig(TreeOptions):
    """Options of `drafter=mtp`.

    The layer was trained to foresee one token beyond the target's own. It drafts further ones from its own output, less
    surely with each.

    Attributes:
        path: folder, file of weights or hub id of a checkpoint with the layer; by default the target's own.
        tree: as of heads of EAGLE; chain follows the layer's first choices.
        depth: of dynamic and chain, the most levels of a tree, or tokens of a chain.
    """

    tree: TreeKind = TreeKind.chain
    depth: AtLeastOne | None = 3


def _build(config: MtpConfig, context: DrafterContext) -> Drafter:
    from emssd_heads.mtp.loading import load_mtp

    shape, lent = shape_of(config, "emssd_heads", top_k=config.top_k), TargetWeights.by(context, "mtp")
    path = config.path or lent.target.model.name_or_path
    if not path:
        raise ConfigError(
            "drafter=mtp drafts with a layer of the target's checkpoint, and this target was read from none: give "
            "drafter.path=FOLDER, or a hub id"
        )
    try:
        loaded = lent.loaded(path, lambda path, _: load_mtp(path, lent))
    except ConfigError as error:
        if config.path:
            raise
        raise ConfigError(f"without drafter.path, drafter=mtp takes the target's own layer: {error}") from error
    return PairedDrafter(loaded.head, loaded.layers, shape, lent)


emssd_drafters = offering(DrafterSpec("mtp", MtpConfig, _build, reads=("mtp",)))
