"""`follow`: what every process but process 0 does, and nothing else: as it is told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.data.model_options import ModelOptions
from emssd.errors import EmssdError, GroupError, UnsupportedModelError
from emssd.model.loading import load_shard
from emssd.model.parallel.group import Group, Shard, packed_of
from emssd.model.parallel.lending import whole_weights
from emssd.model.runner import CausalLMRunner
from emssd.model.target import TargetModel

__all__ = ["MakeBackend", "follow"]

MakeBackend = Callable[[Any, KVCacheSpec], AttentionBackend]
"""Makes a backend by its recipe, allocated."""


def follow(group: Group, make_backend: MakeBackend) -> None:
    """Load, compute and forget what process 0 says, until it has nothing more to say. Raises GroupError: another
    process has ended; or EmssdError: this process cannot do its part; then the others end too.
    """
    _Follower(group, make_backend).follow()


class _Follower:
    """Does what messages say: by a method of its own, or by one of a runner."""

    def __init__(self, group: Group, make_backend: MakeBackend) -> None:
        self._group, self._make_backend = group, make_backend
        self._targets: dict[int, TargetModel] = {}
        self._runners: dict[int, CausalLMRunner] = {}

    @torch.inference_mode()
    def follow(self) -> None:
        while True:
            for call, number, arguments in self._group.hear():
                if call == "end":
                    return
                with self._group.in_step():
                    if hasattr(self, call):
                        getattr(self, call)(number, *arguments)
                    else:  # commits, releases or shares KV between two steps, as process 0 does
                        getattr(self._runners[number], call)(*arguments)

    def load(self, number: int, options: ModelOptions) -> None:
        with suppress(EmssdError):  # process 0 has failed too, and says so; it may go on with something else
            self._targets[number], _ = load_shard(options, Shard(self._group, number))

    def make_cache(self, number: int, model: int, recipe: Any, spec: KVCacheSpec) -> None:
        target = self._targets[model]
        spec = replace(spec, layers=target.layers, dtype=target.dtype, device=target.device)
        self._runners[number] = CausalLMRunner(target, self._make_backend(recipe, spec))

    def drop(self, number: int) -> None:
        for each in (self._targets, self._runners):
            each.pop(number, None)

    def prepare_hidden(self, number: int, indices: list[int]) -> None:
        with suppress(UnsupportedModelError):  # as in process 0
            self._targets[number].prepare_hidden(indices)

    def gather(self, number: int) -> None:
        whole_weights(self._targets[number])

    def run(self, number: int, step: Any) -> None:
        self._runners[number].run(packed_of(step))

    def adopt_prefix(self, number: int, request: str, tokens: list[int], num_cached: int, adopted: int) -> None:
        if (here := self._runners[number].adopt_prefix(request, tokens, num_cached)) < adopted:
            raise GroupError(f"the KV caches of the processes differ: one has {here} tokens of {adopted} to share")
