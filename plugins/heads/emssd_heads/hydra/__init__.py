"""Plugin `drafter=hydra`: trained heads that read the target's last hidden state, and the tokens drafted before theirs.

Ankner et al. 2024, arXiv 2402.05109. Both Hydra and Hydra++ are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from emssd.drafting import Drafter, DrafterContext
from emssd.errors.ranges import AtLeastOne
from emssd.hooks import DrafterSpec, offering
from emssd_heads import TargetWeights, TreeOptions, round_drafter, shape_of

__all__ = ["HydraConfig"]


@dataclass
class HydraConfig(TreeOptions):
    """Options of `drafter=hydra`.

    A level of a tree costs one run of a head for its nodes that are expanded, and a node one token of the target.

    Attributes:
        static_tree: of static, its name: mc_sim_7b_63; or a JSON file with a list of paths. Levels without a head are
            left out.
        num_nodes: of dynamic, the most nodes of a row's tree. Static trees have 63.
        depth: the most levels of a tree, or tokens of a chain; null for one for each head.
    """

    depth: AtLeastOne | None = None


def _build(config: HydraConfig, context: DrafterContext) -> Drafter:
    from emssd_heads.hydra.drafter import HydraDrafter, load_hydra

    lent = TargetWeights.by(context, "hydra")
    loaded = lent.loaded(config.path, partial(load_hydra, target_config=lent.target.config))
    if lent.compile:
        round_drafter(loaded.head)
    return HydraDrafter(loaded, shape_of(config, "emssd_heads.hydra", len(loaded.head), top_k=config.top_k), lent)


emssd_drafters = offering(DrafterSpec("hydra", HydraConfig, _build, reads=("hydra",)))
