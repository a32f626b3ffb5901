"""`LeadingRunner`: the runner of process 0, which has the others do what it does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from emssd.attention import AttentionBackend, Kept, KVCacheSpec, PackedInputs, StepPlan
from emssd.model.parallel.group import Message, step_of
from emssd.model.runner import CausalLMRunner
from emssd.model.target import Computed, TargetModel

__all__ = ["LeadingRunner"]


class LeadingRunner(CausalLMRunner):
    """A shard of a model and of its KV cache, with those of the other processes, which do as this one does.

    The others make their backends by the `recipe`. What happens to KV between two steps is told together with the next
    step.
    """

    _in_one_process = False

    def __init__(self, model: TargetModel, backend: AttentionBackend, spec: KVCacheSpec, recipe: Any) -> None:
        super().__init__(model, backend)
        assert model.shard is not None, "a model that is whole has nobody to lead"
        self._group = model.shard.group
        self._number = self._group.number()
        self._note("make_cache", model.shard.number, recipe, spec)
        weakref.finalize(self, self._group.note, Message("drop", self._number)).atexit = False

    def _announce(self, packed: PackedInputs) -> None:
        self._group.say(Message("run", self._number, (step_of(packed),)))

    def _compute(self, plan: StepPlan) -> Computed:
        with self._group.in_step():
            return super()._compute(plan)

    def commit(self, kept: Kept) -> None:
        super().commit(kept)
        self._note("commit", kept)

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        super().release(request_ids)
        if request_ids:
            self._note("release", request_ids)

    def adopt_prefix(self, request_id: str, tokens: Seq[int], num_cached: int = 0) -> int:
        adopted = super().adopt_prefix(request_id, tokens, num_cached)
        if adopted != num_cached:
            self._note("adopt_prefix", request_id, [*tokens], num_cached, adopted)
        return adopted

    def publish_prefix(self, request_id: str, tokens: Seq[int]) -> None:
        super().publish_prefix(request_id, tokens)
        self._note("publish_prefix", request_id, [*tokens])

    def forget_prefixes(self) -> None:
        super().forget_prefixes()
        self._note("forget_prefixes")

    def _note(self, call: str, *arguments: Any) -> None:
        self._group.note(Message(call, self._number, arguments))
