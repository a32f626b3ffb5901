"""Plugin `drafter=early_exit`: the target's own first layers draft, with its final norm and LM head after them.

Elhoushi et al. 2024, LayerSkip, arXiv 2404.16710. Nothing is loaded, and nothing needs training to run.
"""

from __future__ import annotations

from dataclasses import dataclass

from emssd.draft_models import LayerTreeOptions, ModelDrafter, shallow_runner
from emssd.drafting import Drafter, DrafterContext
from emssd.errors.ranges import AtLeastOne
from emssd.hooks import DrafterSpec, offering

__all__ = ["EarlyExitConfig"]


@dataclass
class EarlyExitConfig(LayerTreeOptions):
    """Options of `drafter=early_exit`.

    A drafted token, or a level of a tree, costs one pass of the first layers and of the LM head. That is meant for
    models that were trained to exit early, as those of LayerSkip; of others, less is accepted.

    Attributes:
        num_layers: of the target's layers, how many draft, from the first on; ``null`` for a quarter, rounded up.
    """

    num_layers: AtLeastOne | None = None


def _build(config: EarlyExitConfig, context: DrafterContext) -> Drafter:
    shape = config.shape()
    runner = shallow_runner(context, config.num_layers, trees=shape.width > 1)
    return ModelDrafter(runner, context.vocab_size, shape)


emssd_drafters = offering(DrafterSpec("early_exit", EarlyExitConfig, _build))
