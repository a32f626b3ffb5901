"""Plugin `drafter=self`: the target's own weights, rounded to 4 bits, draft on the target's own KV cache.

Without training, as in ML-SpecQD (arXiv 2503.13565) and QuantSpec (arXiv 2502.10424).
"""

from __future__ import annotations

from dataclasses import dataclass

from emssd.draft_models import LayerTreeOptions, SharedDrafter
from emssd.drafting import Drafter, DrafterContext
from emssd.errors import ConfigError
from emssd.errors.ranges import AtLeastOne
from emssd.hooks import DrafterSpec, offering

__all__ = ["SelfConfig"]


@dataclass
class SelfConfig(LayerTreeOptions):
    """Options of `drafter=self`.

    A drafted token, or a level of a tree, costs one pass over the rounded weights: of 4 bits, a quarter of the bytes of
    bfloat16. It is meant for where reading weights takes most of a step: a few rows of a model that is much larger than
    the caches, on a CPU with `model.compile=true`.

    Attributes:
        bits: of a rounded weight, 4 or 8, with a scale for each 32 inputs. Activations are rounded to bytes.
        layers: of the target's layers, how many draft, from the first on, uncompiled; ``null`` for all.
    """

    bits: int = 4
    layers: AtLeastOne | None = None


def _build(config: SelfConfig, context: DrafterContext) -> Drafter:
    if context.target is None:
        raise ConfigError("drafter=self rounds the weights of the target, and there is no model to take them of")
    shape = config.shape()
    return SharedDrafter(context.target.rounded(config.bits, config.layers), context.vocab_size, shape)


emssd_drafters = offering(DrafterSpec("self", SelfConfig, _build))
