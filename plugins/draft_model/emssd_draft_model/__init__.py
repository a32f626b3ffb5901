"""Plugin `drafter=draft_model`: a smaller causal LM drafts chains or token trees.

For rows that are sampled it draws with the noise of the target, and with the same temperature, penalties and the like.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from emssd.drafting import Drafter, DrafterContext
from emssd.errors.ranges import AtLeastOne, Meta
from emssd.hooks import DrafterSpec, offering

__all__ = ["DraftModelConfig", "TreeKind", "Vocabulary"]


class TreeKind(str, Enum):
    """The shape of a row's draft."""

    chain = "chain"
    static = "static"
    dynamic = "dynamic"
    sequoia = "sequoia"
    rsd_c = "rsd_c"
    rsd_s = "rsd_s"


class Vocabulary(str, Enum):
    """The way in which a draft model of another tokenizer drafts."""

    same = "same"
    auto = "auto"
    text = "text"
    shared = "shared"


@dataclass
class DraftModelConfig:
    """Options of `drafter=draft_model`; chains of k = 4 are the setting of the EMS-SD paper.

    A tree costs the draft model one pass for each level, and the target one token for each node.

    Attributes:
        path: folder or hub id of the draft model. ``null`` is ``demo-draft`` where the target has the demo's
            tokenizer, and an error elsewhere.
        num_speculative_tokens: tokens drafted per row and step with ``tree=chain`` (the paper's k).
        tree: chain follows the draft model's first choices. static gives every node of a level equally many children
            (SpecInfer, arXiv 2305.09781), or as many as top-k and the like leave in sampling. dynamic follows the most
            probable ways, and keeps the most probable nodes (EAGLE-2, arXiv 2406.16858). sequoia drafts the tree that
            is best for the acceptance measured so far by depth and rank (arXiv 2402.12374). rsd_c and rsd_s are for
            ``sampling.method=residual``: they draw tokens from the draft model's distributions without replacement
            (arXiv 2402.14160). rsd_c has branches like static; rsd_s has equally many nodes at each level, wherever
            sequences are likely.
        expansion: of static and rsd_c, the number of children of each node, level by level. With ones alone, rsd_c is
            the chain of block verification (arXiv 2403.10444).
        width: of rsd_s, the nodes of a level.
        num_nodes: of dynamic and sequoia, the most nodes of a row's tree.
        depth: of dynamic, sequoia and rsd_s, the most levels of a tree.
        top_k: of dynamic, the nodes of a level that are expanded, and the children of each; of sequoia, the most
            children of a node.
        temperature: of dynamic, what the draft model's logits are divided by before its nodes are ranked. It stands for
            how far they are from the target's (`likely_tokens`), and is no temperature of the
            sampling. A target that decodes greedily takes the first choice more often than the draft model's own
            probabilities say.
        acceptance: of sequoia, a JSON file with the acceptance to plan for, in the place of what is measured: a list of
            the levels, each a list of probabilities, that of the draft model's first choice first. Levels below the
            last are like the last.
        vocabulary: same refuses a model whose tokenizer is not the target's. With text it reads the text of a row in
            its own tokens, and the text that it drafts is encoded for the target (universal assisted generation, arXiv
            2502.05202). With shared it reads that text, too, and drafts tokens that both vocabularies have; in rows
            that are sampled with the target's noise. auto takes shared where these are nine tenths of the target's
            tokens, and else text. Other tokenizers draft chains alone.
    """

    path: str | None = None
    num_speculative_tokens: AtLeastOne = 4
    tree: TreeKind = TreeKind.chain
    expansion: list[AtLeastOne] = field(default_factory=lambda: [2, 2, 1, 1])
    width: AtLeastOne = 4
    num_nodes: AtLeastOne = 16
    depth: AtLeastOne = 5
    top_k: AtLeastOne = 4
    temperature: Annotated[float, Meta(ge=0.01, le=100)] = 0.6
    acceptance: str | None = None
    vocabulary: Vocabulary = Vocabulary.same


def _build(config: DraftModelConfig, context: DrafterContext) -> Drafter:
    from emssd_draft_model.build import build

    return build(config, context)


emssd_drafters = offering(DrafterSpec("draft_model", DraftModelConfig, _build, reads=("causal_lm",)))
