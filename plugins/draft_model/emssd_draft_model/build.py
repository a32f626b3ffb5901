"""The drafter that options of a draft model ask for, and the `Shape` of its trees."""

from __future__ import annotations

from emssd_residual.drafter import BeamShape, ChildrenShape, SampledDrafter, SampledShape

from emssd.draft_models import DynamicShape, ModelDrafter, Shape, StaticShape, load_draft_model
from emssd.drafting import Drafter, DrafterContext
from emssd.errors import ConfigError
from emssd.model import load_tokenizer
from emssd_draft_model import DraftModelConfig, TreeKind, Vocabulary
from emssd_draft_model.drafter import DraftModelDrafter
from emssd_draft_model.sequoia import SequoiaShape, read_acceptance
from emssd_draft_model.translated import Speech, TranslatedDrafter, shared_ids

__all__ = ["build"]

_NEARLY_ALL = 0.9  # of the target's tokens: where so many are shared, the others are seldom missed


def build(config: DraftModelConfig, context: DrafterContext) -> Drafter:
    """The drafter of `config`. Raises ConfigError: its model cannot draft for this target."""
    shape, kind = shape_of(config), Vocabulary(config.vocabulary)
    if shape is None and kind is not Vocabulary.same and context.tokenizer is not None:
        return _of_any_vocabulary(config, kind, context)
    if kind is not Vocabulary.same:
        raise ConfigError(
            f"drafter.vocabulary is {kind.value}, which drafts chains with two tokenizers; set drafter.tree=chain, and "
            f"give the target a tokenizer, or set drafter.vocabulary=same"
        )
    runner = load_draft_model(_path_of(config, context), context, trees=shape is not None and shape.width > 1)
    if shape is None:
        return DraftModelDrafter(runner, context.vocab_size, config.num_speculative_tokens)
    if isinstance(shape, SampledShape):
        return SampledDrafter(runner, context.vocab_size, shape)
    return ModelDrafter(runner, context.vocab_size, shape)


def _of_any_vocabulary(config: DraftModelConfig, kind: Vocabulary, context: DrafterContext) -> Drafter:
    path = _path_of(config, context)
    runner, tokenizer = context.load_runner(path)
    if tokenizer is None:
        raise ConfigError(f"draft model {path!r} has no tokenizer, which drafter.vocabulary={kind.value} needs")
    if tokenizer.get_vocab() == context.tokenizer.get_vocab():
        return DraftModelDrafter(runner, context.vocab_size, config.num_speculative_tokens)
    speeches, shared = (Speech(tokenizer, context.tokenizer), Speech(context.tokenizer, tokenizer)), None
    if kind is not Vocabulary.text:
        shared = shared_ids(*speeches, runner.vocab_size, context.vocab_size)
        if kind is Vocabulary.auto and sum(token >= 0 for token in shared) < _NEARLY_ALL * len(context.tokenizer):
            shared = None
    return TranslatedDrafter(runner, speeches, context.vocab_size, config.num_speculative_tokens, shared)


def _path_of(config: DraftModelConfig, context: DrafterContext) -> str:
    """The draft model's path; that of the demo's for a target with the demo's tokenizer. Raises ConfigError: none."""
    if config.path is None and (
        context.tokenizer is None or load_tokenizer("demo-draft").get_vocab() != context.tokenizer.get_vocab()
    ):
        raise ConfigError("drafter=draft_model needs a small model of the target's tokenizer: give drafter.path=FOLDER")
    return config.path or "demo-draft"


def shape_of(config: DraftModelConfig) -> Shape | None:
    """The shape that `config` asks for; ``None`` for chains. Raises ConfigError: an option cannot work."""
    kind = TreeKind(config.tree)
    if config.acceptance is not None and kind is not TreeKind.sequoia:
        raise ConfigError(f"drafter.acceptance is set, but drafter.tree is {kind.value}; only sequoia plans for it")
    if kind is TreeKind.static:
        return StaticShape(config.expansion)
    if kind is TreeKind.dynamic:
        return DynamicShape(config.num_nodes, config.depth, config.top_k, config.temperature)
    if kind is TreeKind.sequoia:
        table = None if config.acceptance is None else read_acceptance(config.acceptance)
        return SequoiaShape(config.num_nodes, config.depth, config.top_k, table)
    if kind is TreeKind.rsd_c:
        return ChildrenShape(config.expansion)
    if kind is TreeKind.rsd_s:
        return BeamShape(config.width, config.depth)
    return None
