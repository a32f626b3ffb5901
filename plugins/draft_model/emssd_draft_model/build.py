"""The drafter that options of a draft model ask for, and the `Shape` of its trees."""

from __future__ import annotations

from typing import Any

from emssd.drafters import DynamicShape, ModelDrafter, Shape, check_vocabulary, same_vocabulary
from emssd.drafting import Drafter, DrafterContext
from emssd.drafting.shapes import check_at_least_one, chosen
from emssd.errors import ConfigError
from emssd.model import ModelRunner
from emssd_draft_model import DraftModelConfig, TreeKind, Vocabulary
from emssd_draft_model.drafter import DraftModelDrafter
from emssd_draft_model.sampled import BeamShape, ChildrenShape, SampledDrafter, SampledShape
from emssd_draft_model.sequoia import SequoiaShape, read_acceptance
from emssd_draft_model.shapes import StaticShape
from emssd_draft_model.translated import Speech, TranslatedDrafter, shared_ids

__all__ = ["build", "shape_of"]

_NEARLY_ALL = 0.9  # of the target's tokens: where so many are shared, the others are seldom missed


def build(config: DraftModelConfig, context: DrafterContext) -> Drafter:
    """The drafter of `config`. Raises ConfigError: its model cannot draft for this target."""
    shape, kind = shape_of(config), chosen(Vocabulary, "vocabulary", config.vocabulary)
    trees = shape is not None and shape.width > 1
    runner, tokenizer = context.load_runner(config.path, trees=True) if trees else context.load_runner(config.path)
    both = None not in (tokenizer, context.tokenizer)
    if kind is not Vocabulary.same and both and not same_vocabulary(tokenizer, context.tokenizer):
        if shape is not None:
            raise ConfigError(
                f"drafter.tree is {config.tree.value}, and draft model {config.path!r} has another tokenizer than the "
                f"target; it can draft chains (drafter.tree=chain)"
            )
        return _translated(config, kind, runner, tokenizer, context)
    check_vocabulary(config.path, runner, tokenizer, context)
    if shape is None:
        return DraftModelDrafter(runner, context.vocab_size, config.num_speculative_tokens)
    if isinstance(shape, SampledShape):
        return SampledDrafter(runner, context.vocab_size, shape)
    return ModelDrafter(runner, context.vocab_size, shape)


def _translated(
    config: DraftModelConfig, kind: Vocabulary, runner: ModelRunner, tokenizer: Any, context: DrafterContext
) -> TranslatedDrafter:
    speeches, shared = (Speech(tokenizer, context.tokenizer), Speech(context.tokenizer, tokenizer)), None
    if kind is not Vocabulary.text:
        shared = shared_ids(*speeches, runner.vocab_size, context.vocab_size)
        if kind is Vocabulary.auto and sum(each >= 0 for each in shared) < _NEARLY_ALL * len(context.tokenizer):
            shared = None
    return TranslatedDrafter(runner, speeches, context.vocab_size, config.num_speculative_tokens, shared)


def shape_of(config: DraftModelConfig) -> Shape | None:
    """The shape that `config` asks for; ``None`` for chains. Raises ConfigError: an option cannot work."""
    kind = chosen(TreeKind, "tree", config.tree)
    if config.acceptance is not None and kind is not TreeKind.sequoia:
        raise ConfigError(f"drafter.acceptance is set, but drafter.tree is {kind.value}; only sequoia plans for it")
    if kind is TreeKind.static:
        return StaticShape(config.expansion)
    if kind is TreeKind.dynamic:
        return DynamicShape(config.num_nodes, config.depth, config.top_k, config.temperature)
    if kind is TreeKind.sequoia:
        check_at_least_one(num_nodes=config.num_nodes, depth=config.depth, top_k=config.top_k)
        table = None if config.acceptance is None else read_acceptance(config.acceptance)
        return SequoiaShape(config.num_nodes, config.depth, config.top_k, table)
    if kind is TreeKind.rsd_c:
        return ChildrenShape(config.expansion)
    if kind is TreeKind.rsd_s:
        return BeamShape(config.width, config.depth)
    return None
