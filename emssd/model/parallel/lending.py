"""`LendingShard`: what drafters borrow of a target of which process 0 has but a shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.nn.functional as F

from emssd.attention import AttentionBackend
from emssd.model.borrowed import BorrowedTarget, runs_no_layers
from emssd.model.rounded import RoundedRunner
from emssd.model.runner import ModelRunner
from emssd.model.streams import Streams
from emssd.model.target import TargetModel

__all__ = ["LendingShard", "whole_weights"]

Weights = dict[str, torch.Tensor]
"""The parameters of a module, by name."""


def whole_weights(target: TargetModel) -> tuple[Weights, Weights]:
    """The weights of embedding table and LM head, put together from all shards; for all processes at once."""
    from torch.distributed.tensor import DTensor

    def whole(module: torch.nn.Module) -> Weights:
        named = module.named_parameters(recurse=False)
        return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in named}

    return whole(target.model.get_input_embeddings()), whole(target.model.get_output_embeddings())


class LendingShard(BorrowedTarget):
    """Lends in process 0 what the target would lend if it were whole, and asks the others only once.

    Embeddings and LM head are gathered when they are first borrowed, and take their whole memory in process 0.
    """

    def __init__(self, target: TargetModel) -> None:
        super().__init__(target)
        assert target.shard is not None, "a model that is whole can be lent as it is"
        self._shard = target.shard

    def embed(self, token_ids: torch.Tensor, *, raw: bool = False) -> torch.Tensor:
        if raw:
            return F.embedding(token_ids, self._weights[0]["weight"])
        weights, _ = self._weights
        with _made_whole(self._model.get_input_embeddings(), weights):
            return super().embed(token_ids)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        _, weights = self._weights
        with _made_whole(self._model.get_output_embeddings(), weights):
            return super().project(hidden)

    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        raise runs_no_layers("model.tensor_parallel=true")

    def rounded(self, bits: int, num_layers: int | None = None) -> RoundedRunner:
        raise runs_no_layers("model.tensor_parallel=true")

    def first_layers(self, num_layers: int, cache: AttentionBackend) -> ModelRunner:
        raise runs_no_layers("model.tensor_parallel=true")

    @cached_property
    def _streams(self) -> Streams:
        return self._target.streams or self._target.prepare_hidden(())

    @cached_property
    def _weights(self) -> tuple[Weights, Weights]:
        if self._target.streams is None:  # what proves them is a pass of all processes, so before anything is whole
            self._target.prepare_hidden(())
        with self._shard.together("gather"), torch.inference_mode():
            return whole_weights(self._target)


@contextmanager
def _made_whole(module: torch.nn.Module, weights: Weights) -> Iterator[None]:
    """Within, `module` computes what its class does, with these weights, and asks no other process."""
    shards, forward = dict(module._parameters), vars(module).pop("forward", None)
    for name, weight in weights.items():
        module._parameters[name] = torch.nn.Parameter(weight, requires_grad=False)
    try:
        yield
    finally:
        module._parameters.update(shards)
        if forward is not None:
            module.forward = forward
