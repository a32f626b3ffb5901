"""Models to draft with: one at a drafter's ``path``, or the target's own first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from emssd.drafting import DrafterContext
from emssd.errors import ConfigError
from emssd.model import ModelRunner

__all__ = ["load_draft_model", "shallow_runner"]


def load_draft_model(path: str, context: DrafterContext, *, trees: bool = False) -> ModelRunner:
    """The draft model at `path`, with a KV cache that takes token trees or not.

    Raises:
        ConfigError: it does not share the target's vocabulary.
    """
    runner, tokenizer = context.load_runner(path, trees=True) if trees else context.load_runner(path)
    _check_vocabulary(path, runner, tokenizer, context)
    return runner


def _check_vocabulary(path: str, model: ModelRunner, tokenizer: Any, context: DrafterContext) -> None:
    if tokenizer is not None and context.tokenizer is not None:
        if tokenizer.get_vocab() == context.tokenizer.get_vocab():
            return  # vocabulary sizes of the models may still differ by unused padding ids
        what = f"its tokenizer ({len(tokenizer)} tokens) is not the target's ({len(context.tokenizer)} tokens)"
    elif model.vocab_size == context.vocab_size:
        return
    else:
        what = f"its vocabulary has {model.vocab_size} tokens and the target's {context.vocab_size}"
    raise ConfigError(
        f"draft model {path!r} cannot draft for this target: {what}. Set drafter.path to a model that was trained "
        f"with the target's tokenizer, usually a smaller one of the same family. Where the drafter has "
        f"the option, drafter.vocabulary=auto lets one with another tokenizer draft by the text."
    )


def shallow_runner(context: DrafterContext, num_layers: int | None, *, trees: bool = False) -> ModelRunner:
    """The target's first layers, its final norm and its LM head, with a KV cache of their own.

    Args:
        context: lends the target.
        num_layers: how many; ``None`` for a quarter of them, rounded up.
        trees: whether the cache takes token trees.

    Raises:
        ConfigError: there is no target, or it has not so many layers.
        UnsupportedModelError: its layers are not found, or cannot be left out.
    """
    target, spec = context.target, context.cache_spec
    if target is None or spec is None or context.make_cache is None:
        raise ConfigError("the drafter runs layers of the target, and there is no model to take them of")
    if num_layers is None:
        num_layers = -(-target.num_layers // 4)
    if not 1 <= num_layers <= target.num_layers:
        raise ConfigError(f"drafter.num_layers is {num_layers}; choose 1 to {target.num_layers}, as the target has")
    own = replace(spec, layers=spec.layers[:num_layers], trees=trees, prefix_caching=False)
    return target.first_layers(num_layers, context.make_cache(own))
