"""The parts that all kinds of drafter share: recipes, the target as a teacher, the distance from it, and files."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from emssd.model import BorrowedTarget, TargetModel
from emssd_heads.training.texts import Text, writing

__all__ = ["DraftLoss", "Recipe", "Teacher", "choosable", "divergence", "save_files", "whole_files"]

_DECAY = 0.8  # of the weight of each further depth, as in the code of EAGLE's and of Medusa's authors


class DraftLoss(nn.Module, ABC):
    """The distance of a drafter from its target, as a module for a training loop.

    The loss of a depth is the mean divergence of the drafter's distribution from the target's, where a draft may be:
    after the first new token of a text, up to its end. Weights fall by a constant factor with each depth.
    """

    @abstractmethod
    def by_depth(
        self, input_ids: torch.Tensor, num_prompt: torch.Tensor, num_tokens: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """The loss of a batch at each depth.

        Args:
            input_ids: ``[b, n]`` texts, padded on the right.
            num_prompt: ``[b]`` tokens of each prompt; fewer, if something is to be learnt from it.
            num_tokens: ``[b]`` tokens of each text.
        """

    def forward(
        self, input_ids: torch.Tensor, num_prompt: torch.Tensor, num_tokens: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """``loss``, the weighted sum, and ``losses [depth]``."""
        losses = torch.stack([*self.by_depth(input_ids, num_prompt, num_tokens)])
        weights = _DECAY ** torch.arange(len(losses), device=losses.device)
        return {"loss": (losses * weights).sum(), "losses": losses.detach()}


class Recipe(NamedTuple):
    """One kind of drafter, for one target.

    Attributes:
        begin: makes a new drafter for the texts of a training: its loss, and a function that saves it.
        drafter: options of the plugin that drafts with it, chains of the trained length.
        max_len: tokens of the longest text of a training.
    """

    begin: Callable[[Seq[Text]], tuple[DraftLoss, Callable[[Path], None]]]
    drafter: Any
    max_len: int


class Lesson(NamedTuple):
    """The target's outputs for a batch of texts.

    Attributes:
        embeds: ``[b, n, hidden_size]`` of its tokens.
        hidden: ``[b, n, num_layers * hidden_size]`` hidden states, side by side.
        logits: ``[b, n, vocab]``.
    """

    embeds: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor


class Teacher:
    """The target, which is not trained: a drafter learns from its outputs.

    Args:
        layers: numbers of hidden states, see `emssd.model.hf.streams.Streams`.

    Raises:
        UnsupportedModelError: the model gives none.
    """

    def __init__(self, target: TargetModel, layers: Seq[int]) -> None:
        self.borrowed = BorrowedTarget(target)
        target.prepare_hidden(layers)
        target.model.requires_grad_(False)
        self._target, self._layers = target, tuple(layers)

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor) -> Lesson:
        """The lesson of ``input_ids [b, n]``, which are padded on the right if at all."""
        streams = self._target.streams
        assert streams is not None
        hidden = dict.fromkeys(self._layers, torch.empty(0))
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        with streams.taken(hidden):
            logits = self._target.model(input_ids=input_ids, position_ids=positions, use_cache=False).logits
        states = torch.cat([logits[..., :0], *(hidden[layer] for layer in self._layers)], dim=-1)
        return Lesson(self.borrowed.embed(input_ids), states, logits)


def choosable(logits: torch.Tensor, target_ids: torch.Tensor | None) -> torch.Tensor:
    """``[...]`` bool: whether the target's own choice, by its ``logits [..., vocab]``, is one of `target_ids`.

    These are the tokens that can be drafted; ``None`` for all.
    """
    drafted = logits.new_ones(logits.shape[-1], dtype=torch.bool)
    if target_ids is not None:
        drafted = torch.zeros_like(drafted).index_fill_(0, target_ids, True)
    return drafted[logits.argmax(-1)]


def divergence(logits: torch.Tensor, wanted: torch.Tensor, target_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The mean Kullback-Leibler divergence of ``logits [t, draft_vocab]`` from the target's, ``wanted [t, vocab]``.

    The logits are for `target_ids`; ``None`` for all. Without rows, it is 0.
    """
    if not len(logits):
        return logits.sum()
    wanted = wanted if target_ids is None else wanted[:, target_ids]
    wide = torch.promote_types(logits.dtype, torch.float32)
    is_, should = logits.to(wide).log_softmax(-1), wanted.to(wide).log_softmax(-1)
    return F.kl_div(is_, should, reduction="batchmean", log_target=True)


def save_files(folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    """Write ``model.safetensors`` and ``config.json``. The weights are contiguous and on the CPU."""
    from safetensors.torch import save

    with whole_files(folder) as unfinished:
        (unfinished / "model.safetensors").write_bytes(save({**weights}, {"format": "pt"}))
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def whole_files(folder: Path) -> Iterator[Path]:
    """A folder to write files to, which are moved to `folder` when all are written, ``config.json`` last."""
    with writing(folder), TemporaryDirectory(dir=folder) as unfinished:
        yield Path(unfinished)
        for file in sorted(Path(unfinished).iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, folder / file.name)
