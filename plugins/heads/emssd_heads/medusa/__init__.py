"""Plugin `drafter=medusa`: trained heads that each guess one of the next tokens from the target's last hidden state.

Cai et al. 2024, arXiv 2401.10774.
"""

from __future__ import annotations

from dataclasses import dataclass

from emssd.drafting import Drafter, DrafterContext
from emssd.hooks import DrafterSpec, offering
from emssd_heads import HeadTreeOptions, TargetWeights, round_drafter, shape_of

__all__ = ["MedusaConfig"]


@dataclass
class MedusaConfig(HeadTreeOptions):
    """Options of `drafter=medusa`.

    All heads run once a step, whatever the tree. So a tree costs the tokens that the target verifies, and no more.

    Attributes:
        tree: dynamic drafts the most probable combinations of the heads' choices, by the product of their
            probabilities. static drafts a published tree, which is the same in every step. chain follows the heads'
            first choices.
        static_tree: of static, its name: mc_sim_7b_63, or {vicuna_7b,vicuna_13b,vicuna_33b}_{stage1,stage2},
            vicuna_7b_stage1_ablation, zephyr_stage2; or a JSON file with a list of paths. Levels without a head are
            left out.
        num_nodes: of dynamic, the most nodes of a row's tree. Static trees have 63.
    """


def _build(config: MedusaConfig, context: DrafterContext) -> Drafter:
    from emssd_heads.medusa.drafter import MedusaDrafter, load_medusa

    lent = TargetWeights.by(context, "medusa")
    heads = lent.loaded(config.path, load_medusa).head
    if lent.compile:
        round_drafter(heads)
    shape = shape_of(config, "emssd_heads.medusa", len(heads), top_k=config.num_nodes)
    return MedusaDrafter(heads, shape, lent.target)


emssd_drafters = offering(DrafterSpec("medusa", MedusaConfig, _build, reads=("medusa",)))
