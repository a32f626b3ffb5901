"""Plugin `drafter=kangaroo`: the target's own first layers draft, with a trained adapter after them.

Liu et al. 2024, Kangaroo, arXiv 2404.18911.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from emssd.draft_models import DynamicShape, ModelDrafter, shallow_runner
from emssd.drafting import Drafter, DrafterContext
from emssd.errors.ranges import AtLeastOne, Share
from emssd.hooks import DrafterSpec, offering
from emssd_heads import HeadRunner, TargetWeights

__all__ = ["KangarooConfig"]


@dataclass
class KangarooConfig:
    """Options of `drafter=kangaroo`; the defaults are those of its authors.

    Attributes:
        path: folder, file of weights or hub id of the adapter, which must be trained for this target.
        num_layers: how many of the target's layers the adapter was trained after. Its files do not say. A wrong number
            changes no token, but hardly anything is accepted.
        num_speculative_tokens: the most tokens drafted per row and step.
        min_confidence: after a drafted token that is less probable, as the adapter sees it, nothing is drafted; 0
            never ends a draft early.
    """

    path: str | None = None
    num_layers: AtLeastOne = 2
    num_speculative_tokens: AtLeastOne = 6
    min_confidence: Share = 0.6


def _build(config: KangarooConfig, context: DrafterContext) -> Drafter:
    from emssd_heads.kangaroo.runner import KangarooRunner, load_adapter

    length = config.num_speculative_tokens
    shape = DynamicShape(length, length, 1, min_confidence=config.min_confidence)
    lent, shallow = TargetWeights.by(context, "kangaroo"), shallow_runner(context, config.num_layers)
    loaded = lent.loaded(config.path, partial(load_adapter, num_layers=config.num_layers))
    spec = loaded.head.kv_cache_spec(lent.spec)
    adapter = HeadRunner(loaded.head, lent.make_cache(spec), compile=lent.compile)
    runner = KangarooRunner(shallow, config.num_layers, adapter, spec.max_model_len, lent.target)
    return ModelDrafter(runner, context.vocab_size, shape)


emssd_drafters = offering(DrafterSpec("kangaroo", KangarooConfig, _build, reads=("kangaroo",)))
