"""A recipe for each kind of drafter: how it is made, trained, saved, and drafted with."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from emssd_eagle3 import Eagle3Config
from emssd_medusa import MedusaConfig
from emssd_pard import PardConfig
from torch import nn

from emssd.drafters.heads.options import TreeKind
from emssd.drafters.heads.target import LAST_NORMED
from emssd.model import TargetModel
from emssd_train.eagle3 import check_layers, default_layers, head_config, new_head, save_head
from emssd_train.medusa import MedusaLoss, check_target, new_heads, save_heads
from emssd_train.options import Eagle3Options, MedusaOptions, PardOptions, TrainOptions
from emssd_train.pard import PardLoss, load_draft, save_model, with_mask
from emssd_train.teacher import Teacher
from emssd_train.texts import Text, frequent_tokens
from emssd_train.unrolled import UnrolledLoss

__all__ = ["Recipe", "Trainee", "make_recipe"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Trainee(NamedTuple):
    """A drafter to be trained.

    Attributes:
        loss: called with a batch of texts as `emssd_train.unrolled.UnrolledLoss` is. What it has to train is the
            drafter.
        save: writes the drafter, as it is then, to a folder.
    """

    loss: nn.Module
    save: Callable[[Path], None]


class Recipe(NamedTuple):
    """One kind of drafter, for one target.

    Attributes:
        begin: makes a new drafter, given the texts that it will be trained on.
        drafter: the options of a plugin that drafts chains with what is saved, as long as it was trained for.
        max_len: tokens of the longest text that it can be trained on.
    """

    begin: Callable[[Seq[Text]], Trainee]
    drafter: Any
    max_len: int


def make_recipe(options: TrainOptions, target: TargetModel, tokenizer: Any) -> Recipe:
    """The recipe that `options` ask for.

    Raises:
        ConfigError: they do not go together with the target.
        UnsupportedModelError: the target gives no hidden states.
    """
    dtype = _DTYPES.get(options.dtype or "", target.dtype)
    match options:
        case Eagle3Options():
            return _eagle3(options, target, dtype)
        case MedusaOptions():
            return _medusa(options, target, dtype)
        case PardOptions():
            return _pard(options, target, tokenizer, dtype)
    raise AssertionError(f"no recipe for {type(options).__name__}")


def _eagle3(options: Eagle3Options, target: TargetModel, dtype: torch.dtype) -> Recipe:
    layers = options.hidden_layers or default_layers(len(target.layers))
    check_layers(layers, target)
    teacher, config = Teacher(target, layers), head_config(options, target, layers)

    def begin(texts: Seq[Text]) -> Trainee:
        drafted = frequent_tokens(texts, target.vocab_size, options.draft_vocab_size)
        head = new_head(config, target, drafted, options)
        save = partial(save_head, head=head, config=config, vocab_size=target.vocab_size, dtype=dtype)
        return Trainee(UnrolledLoss(head, teacher, options.depth), save)

    return Recipe(
        begin, Eagle3Config(path=options.output, tree=TreeKind.chain, depth=options.depth), target.max_model_len
    )


def _medusa(options: MedusaOptions, target: TargetModel, dtype: torch.dtype) -> Recipe:
    check_target(target)
    teacher = Teacher(target, (LAST_NORMED,))

    def begin(texts: Seq[Text]) -> Trainee:
        heads = new_heads(options, target, frequent_tokens(texts, target.vocab_size, options.draft_vocab_size))
        save = partial(save_heads, heads=heads, options=options, target=target, dtype=dtype)
        return Trainee(MedusaLoss(heads, teacher), save)

    return Recipe(begin, MedusaConfig(path=options.output, tree=TreeKind.chain), target.max_model_len)


def _pard(options: PardOptions, target: TargetModel, tokenizer: Any, dtype: torch.dtype) -> Recipe:
    teacher = Teacher(target, ())
    draft, own = load_draft(options, target, tokenizer)

    def begin(texts: Seq[Text]) -> Trainee:
        masked, mask = with_mask(draft)
        save = partial(save_model, draft=masked, tokenizer=own, dtype=dtype)
        return Trainee(PardLoss(masked, teacher, mask, options.depth), save)

    drafter = PardConfig(path=options.output, num_speculative_tokens=options.depth)
    return Recipe(begin, drafter, min(draft.max_model_len, target.max_model_len))
