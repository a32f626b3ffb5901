"""Medusa heads for a target: new ones, their loss, and the files that they are saved in, those of vLLM.

Cai et al. 2024, arXiv 2401.10774, §2.1 and §2.2.1 (Medusa-1: nothing of the target is trained).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path

import torch
from torch import nn

from emssd.errors import ConfigError
from emssd.model import TargetModel
from emssd_heads.config import LAST_NORMED
from emssd_heads.medusa import MedusaConfig
from emssd_heads.options import TreeKind
from emssd_heads.residual import ResidualHeads
from emssd_heads.training.options import MedusaOptions
from emssd_heads.training.shared import DraftLoss, Recipe, Teacher, choosable, divergence, save_files
from emssd_heads.training.texts import Text, frequent_tokens

__all__ = ["recipe"]


def recipe(options: MedusaOptions, target: TargetModel, _: object, dtype: torch.dtype) -> Recipe:
    """The recipe of heads. Raises ConfigError: the target's vocabulary projection reads no hidden states."""
    width = target.model.get_output_embeddings().weight.shape[1]
    size = target.model.config.get_text_config().hidden_size
    if width != size:
        raise ConfigError(f"the target's vocabulary projection reads {width} elements, and hidden states have {size}")
    teacher = Teacher(target, (LAST_NORMED,))

    def begin(texts: Seq[Text]) -> tuple[DraftLoss, Callable[[Path], None]]:
        heads = new_heads(options, target, frequent_tokens(texts, target.vocab_size, options.draft_vocab_size))
        save = partial(save_heads, heads=heads, options=options, target=target, dtype=dtype)
        return MedusaLoss(heads, teacher), save

    return Recipe(begin, MedusaConfig(path=options.output, tree=TreeKind.chain), target.max_model_len)


def new_heads(options: MedusaOptions, target: TargetModel, drafted: Seq[int] | None) -> ResidualHeads:
    """Heads in float32 or wider that all begin as the target's vocabulary projection, after layers that do nothing.

    They draft the tokens with the target's ids `drafted`; ``None`` for all.
    """
    rows = target.model.get_output_embeddings().weight.detach()
    rows = rows if drafted is None else rows[torch.tensor(drafted, device=rows.device)]
    biases = {f"layers.{h}.{layer}.linear.bias" for h in range(options.depth) for layer in range(options.num_layers)}
    size = rows.shape[1]
    heads = ResidualHeads([size] * options.depth, options.num_layers, size, len(rows), biases)
    heads.to(target.device, torch.promote_types(target.dtype, torch.float32))
    with torch.no_grad():
        for name, weight in heads.named_parameters():
            if ".linear." in name:
                nn.init.zeros_(weight)
            else:
                weight.copy_(rows)
    if drafted is not None:
        heads.target_ids = torch.tensor(drafted, device=target.device)
    return heads


class MedusaLoss(DraftLoss):
    """The loss of heads, head by head, over the tokens that they can draft, where the target's own choice is one.

    The head at ``h`` reads the state that the target chooses token ``i + 1`` from, and guesses token ``i + 2 + h``.
    """

    def __init__(self, heads: ResidualHeads, teacher: Teacher) -> None:
        super().__init__()
        self.heads = heads
        self._teacher = teacher

    def by_depth(
        self, input_ids: torch.Tensor, num_prompt: torch.Tensor, num_tokens: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        lesson, drafted = self._teacher(input_ids), self.heads.target_ids
        hidden = lesson.hidden.to(next(self.heads.parameters()).dtype)
        can_choose = choosable(lesson.logits, drafted)
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        begins = position >= num_prompt[:, None] - 1
        for head in range(len(self.heads)):
            ahead = head + 1  # the target's own logits for a guess stand so many positions after its state
            counted = begins & (position + ahead + 1 < num_tokens[:, None]) & can_choose.roll(-ahead, 1)
            logits, wanted = self.heads(head, hidden[counted]), lesson.logits.roll(-ahead, 1)[counted]
            yield divergence(logits, wanted, drafted)


def save_heads(
    folder: Path, heads: ResidualHeads, options: MedusaOptions, target: TargetModel, dtype: torch.dtype
) -> None:
    """Write ``config.json`` and ``model.safetensors``."""
    weights = {}
    for name, weight in heads.state_dict().items():
        part, head, *rest = name.split(".")
        new = f"blocks.{head}.layers.{rest[0]}.{rest[-1]}" if part == "layers" else f"lm_heads.{head}.weight"
        weights[new] = weight.detach().to("cpu", dtype).contiguous()
    num_tokens = target.vocab_size
    if heads.target_ids is not None:
        weights["token_map"], num_tokens = heads.target_ids.cpu(), len(heads.target_ids)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": options.model,
        "hidden_size": target.model.config.get_text_config().hidden_size,
        "vocab_size": target.vocab_size,
        "truncated_vocab_size": num_tokens,
        "num_heads": options.depth,
        "num_hidden_layers": options.num_layers,
        "medusa_fc_bias": True,
    }
    save_files(folder, config, weights)
