"""A PARD model: an ordinary draft model with a mask, the loss that it learns to fill in masks with, and its files.

An et al. 2025, PARD, arXiv 2504.18583, §3.2. The token that is drafted `k`-th is a subtask of its own: ``k - 1`` masks
follow the text. Here all subtasks of all positions of a text go through the model at once, and none is left out by the
paper's conditional drop of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from emssd.attention import LayerSpec
from emssd.attention.masked import additive_mask, masked_attention
from emssd.errors import ConfigError
from emssd.model import BorrowedTarget, ModelOptions, TargetModel, load_model
from emssd_heads.config import LAST_NORMED
from emssd_heads.pard import PardConfig
from emssd_heads.training.options import PardOptions
from emssd_heads.training.shared import DraftLoss, Recipe, Teacher, choosable, divergence, whole_files
from emssd_heads.training.texts import Text

__all__ = ["recipe"]


def recipe(options: PardOptions, target: TargetModel, tokenizer: Any, dtype: torch.dtype) -> Recipe:
    """The recipe of a model. Raises ConfigError: there is none to begin with, or it is none for this target."""
    teacher = Teacher(target, ())
    draft, draft_tokenizer = _load_draft(options, target, tokenizer)

    def begin(_: Seq[Text]) -> tuple[DraftLoss, Callable[[Path], None]]:
        masked, mask = with_mask(draft)
        save = partial(_save_model, draft=masked, tokenizer=draft_tokenizer, dtype=dtype)
        return PardLoss(masked, teacher, mask, options.depth), save

    drafter = PardConfig(path=options.output, num_speculative_tokens=options.depth)
    return Recipe(begin, drafter, min(draft.max_model_len, target.max_model_len))


def _load_draft(options: PardOptions, target: TargetModel, tokenizer: Any) -> tuple[TargetModel, Any]:
    """The model to begin with, in float32 or wider, and its tokenizer."""
    dtype = torch.promote_types(target.dtype, torch.float32)
    draft, draft_tokenizer = load_model(
        ModelOptions(options.draft, dtype=str(dtype).removeprefix("torch."), device=str(target.device), compile=False)
    )
    if draft_tokenizer is None or tokenizer is None or draft_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"--draft {options.draft} has not the target's tokenizer; give a model that has it")
    return draft, draft_tokenizer


def with_mask(draft: TargetModel) -> tuple[TargetModel, int]:
    """`draft` with a mask, and the mask's id. A model without one gets a new token, which begins as the mean of all.

    The model itself is changed.
    """
    model = draft.model
    if (pard_token := getattr(model.config, "pard_token", None)) is not None:
        return draft, int(pard_token)
    mask = draft.vocab_size
    model.resize_token_embeddings(mask + 1, mean_resizing=False)
    with torch.no_grad():
        for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            table[mask:] = table[:mask].mean(0)
    model.config.pard_token = mask
    return TargetModel(model), mask


class Masked:
    """Texts, and after them a chain of masks for each position, as one pass of a model reads them.

    A mask has the position of the token that it stands for. It sees the text up to the position after which its chain
    begins, the masks before it in its chain, and itself.

    Args:
        input_ids: ``[b, n]``.
        first: the first position that a chain begins after.
        num_masks: of a chain; masks after the last position but one are left out.

    Attributes:
        begin, depth: ``[m]`` of each mask the position that its chain begins after, and its number in the chain, from
            1 on. A token of a text has its own position, and 0.
        position: ``[m]`` of all tokens.
    """

    def __init__(self, input_ids: torch.Tensor, first: int, num_masks: int, mask: int) -> None:
        self._shape = num_rows, num_tokens = input_ids.shape
        device = input_ids.device
        begins = torch.arange(first, num_tokens - 1, device=device).repeat_interleave(num_masks)
        depths = torch.arange(1, num_masks + 1, device=device).repeat(max(num_tokens - 1 - first, 0))
        inside = begins + depths < num_tokens - 1
        text = torch.arange(num_tokens, device=device)
        self.begin = torch.cat([text, begins[inside]])
        self.depth = torch.cat([torch.zeros_like(text), depths[inside]])
        self.position = self.begin + self.depth
        masks = input_ids.new_full((num_rows, int(inside.sum())), mask)
        self._ids = torch.cat([input_ids, masks], dim=1)

    @property
    def visible(self) -> torch.Tensor:
        """``[m, m]`` bool: which tokens each token sees."""
        in_text, in_chain = self.begin <= self.begin[:, None], self.begin == self.begin[:, None]
        return torch.where(self.depth == 0, in_text, in_chain & (self.depth <= self.depth[:, None]))

    def states(self, model: TargetModel) -> torch.Tensor:
        """``[b, m, width]`` the last hidden states, after the final norm."""
        visible, num_rows = self.visible, self._shape[0]

        def attend(
            layer: int, spec: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            seen = visible
            if spec.sliding_window is not None:
                seen = visible & (self.position > self.position[:, None] - spec.sliding_window)
            mask = additive_mask(seen, query.dtype).expand(num_rows, -1, -1)
            query, key, value = (flat.view(num_rows, -1, *flat.shape[1:]) for flat in (query, key, value))
            return masked_attention(query, key, value, mask, spec, checked=False).flatten(0, 1)

        hidden = {LAST_NORMED: torch.empty(0)}
        positions = self.position.expand(num_rows, -1)
        model.run(self._ids, positions, attend, logits_to_keep=1, hidden=hidden)
        return hidden[LAST_NORMED]


class PardLoss(DraftLoss):
    """The loss of a model that fills in masks, over the tokens that it and its target know.

    The model runs as in drafting, without dropout.
    """

    def __init__(self, draft: TargetModel, teacher: Teacher, mask: int, depth: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(draft.model.parameters())  # each once, also an LM head that is the embeddings
        self._draft, self._teacher, self._mask, self._depth = draft, teacher, mask, depth
        draft.prepare_hidden((LAST_NORMED,))
        self._borrowed = BorrowedTarget(draft)

    def by_depth(
        self, input_ids: torch.Tensor, num_prompt: torch.Tensor, num_tokens: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        target_logits = self._teacher(input_ids).logits
        masked = Masked(input_ids, int(num_prompt.min()), self._depth - 1, self._mask)
        states = masked.states(self._draft)
        size = min(target_logits.shape[-1], self._draft.vocab_size)
        can_choose = choosable(target_logits, torch.arange(size, device=input_ids.device))
        ends = masked.position + 1 < num_tokens[:, None]
        counted = ends & (masked.begin >= num_prompt[:, None]) & can_choose[:, masked.position]
        for depth in range(self._depth):
            rows, slots = (counted & (masked.depth == depth)).nonzero(as_tuple=True)
            logits = self._borrowed.project(states[rows, slots])[:, :size] if len(rows) else states[:0, 0]
            yield divergence(logits, target_logits[rows, masked.position[slots], :size])


def _save_model(folder: Path, draft: TargetModel, tokenizer: Any, dtype: torch.dtype) -> None:
    """Write the model, which is converted to `dtype`, and its tokenizer, as Transformers does."""
    with whole_files(folder) as unfinished:
        tokenizer.save_pretrained(unfinished)
        draft.model.to(dtype).save_pretrained(unfinished)
