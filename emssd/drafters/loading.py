"""Loads the model at a drafter's ``path``, and refuses one that does not share the target's vocabulary."""

from __future__ import annotations

from typing import Any

from emssd.drafting import DrafterContext
from emssd.errors import ConfigError
from emssd.model import ModelRunner

__all__ = ["load_draft_model"]


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
        f"with the target's tokenizer, usually a smaller one of the same family."
    )
