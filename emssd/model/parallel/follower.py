"""`follow`: what every process but process 0 does, and nothing else: as it is told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.errors import EmssdError, GroupError, UnsupportedModelError
from emssd.model.loading import Wanted, load_shard
from emssd.model.parallel.checksums import Checksums
from emssd.model.parallel.group import Group, Shard
from emssd.model.parallel.leader import CacheWanted
from emssd.model.parallel.lending import whole_weights
from emssd.model.parallel.messages import Kind, Message, packed_of
from emssd.model.runner import CausalLMRunner
from emssd.model.target import TargetModel

__all__ = ["MakeBackend", "follow"]

MakeBackend = Callable[[Any, KVCacheSpec], AttentionBackend]
"""Makes a backend by its recipe, allocated."""


def follow(group: Group, make_backend: MakeBackend) -> None:
    """Load, compute and forget what process 0 says, until it has nothing more to say. Raises GroupError: another
    process has ended; or EmssdError: this process cannot do its part; then the others end too.
    """
    _Follower(group, make_backend).run()


class _Follower:
    def __init__(self, group: Group, make_backend: MakeBackend) -> None:
        self._group, self._make_backend = group, make_backend
        self._targets: dict[int, TargetModel] = {}
        self._runners: dict[int, CausalLMRunner] = {}
        self._checksums: dict[int, Checksums] = {}

    @torch.inference_mode()
    def run(self) -> None:
        while True:
            messages, told = self._group.hear()
            for message in messages:
                if message.kind is Kind.END:
                    return
                with self._group.in_step():
                    self._do(message, told)

    def _do(self, message: Message, told: bytes) -> None:
        kind, number, value = message
        if kind is Kind.LOAD:
            self._load(number, value)
        elif kind is Kind.CACHE:
            self._make_cache(number, value)
        elif kind is Kind.DROP:
            for each in (self._targets, self._runners, self._checksums):
                each.pop(number, None)
        elif kind is Kind.HIDDEN:
            with suppress(UnsupportedModelError):  # as in process 0
                self._targets[number].prepare_hidden(value)
        elif kind is Kind.GATHER:
            whole_weights(self._targets[number])
        elif kind is Kind.RUN:
            checked = self._checksums.get(number)
            with nullcontext() if checked is None else checked.compared(told):
                self._runners[number].run(packed_of(value))
        else:
            _keep_up(self._runners[number], kind, value)

    def _load(self, number: int, wanted: Wanted) -> None:
        with suppress(EmssdError):  # process 0 has failed too, and says so; it may go on with something else
            self._targets[number], _ = load_shard(wanted, Shard(self._group, number, wanted.checksums))

    def _make_cache(self, number: int, wanted: CacheWanted) -> None:
        target = self._targets[wanted.model]
        self._runners[number] = CausalLMRunner(target, self._make_backend(wanted.backend, wanted.spec(target)))
        if target.shard is not None and target.shard.checksums:
            self._checksums[number] = Checksums(target)


def _keep_up(runner: CausalLMRunner, kind: Kind, value: Any) -> None:
    """Commit, release and share KV between two steps, as process 0 does."""
    if kind is Kind.COMMIT:
        runner.commit(value)
    elif kind is Kind.RELEASE:
        runner.release(value)
    elif kind is Kind.ADOPT:
        request, tokens, num_cached, adopted = value
        if (here := runner.adopt_prefix(request, tokens, num_cached)) < adopted:
            raise GroupError(f"the KV caches of the processes differ: one has {here} tokens of {adopted} to share")
    elif kind is Kind.PUBLISH:
        runner.publish_prefix(*value)
    else:
        assert kind is Kind.FORGET, f"a message of kind {kind}"
        runner.forget_prefixes()
