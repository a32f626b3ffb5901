"""`LeadingRunner`: the runner of process 0, which has the others do what it does."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import torch

from emssd.attention import AttentionBackend, Kept, KVCacheSpec, PackedInputs, StepPlan
from emssd.model.parallel.checksums import Checksums
from emssd.model.parallel.lending import prepare_hidden
from emssd.model.parallel.messages import Kind, Message, step_of
from emssd.model.runner import CausalLMRunner
from emssd.model.target import Computed, TargetModel

__all__ = ["CacheWanted", "LeadingRunner"]


@dataclasses.dataclass(frozen=True, slots=True)
class CacheWanted:
    """The KV cache that every process makes for its shard: of which model, by which recipe, and with which limits."""

    model: int
    backend: Any
    values: dict[str, Any]

    @classmethod
    def of(cls, model: int, backend: Any, spec: KVCacheSpec) -> CacheWanted:
        """A cache like that of `spec`, for whatever layers a process has."""
        own = ("layers", "dtype", "device")
        values = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec) if each.name not in own}
        return cls(model, backend, values)

    def spec(self, target: TargetModel) -> KVCacheSpec:
        """The spec of the cache for the shard `target`."""
        return dataclasses.replace(target.kv_cache_spec(self.values["max_batch_size"]), **self.values)


class LeadingRunner(CausalLMRunner):
    """A shard of a model and of its KV cache, with those of the other processes, which do as this one does.

    What happens to KV between two steps is told together with the next step.

    Args:
        model: a shard, in process 0.
        backend: for `model`.
        spec: for which `backend` is allocated.
        recipe: of the backend; the others make theirs by it.
    """

    _takes_chains = _in_one_process = False

    def __init__(self, model: TargetModel, backend: AttentionBackend, spec: KVCacheSpec, recipe: Any) -> None:
        super().__init__(model, backend)
        assert model.shard is not None, "a model that is whole has nobody to lead"
        self._group = model.shard.group
        self._number = self._group.number()
        self._checksums = Checksums(model) if model.shard.checksums else None
        self._note(Kind.CACHE, CacheWanted.of(model.shard.number, recipe, spec))
        weakref.finalize(self, self._group.note, Message(Kind.DROP, self._number)).atexit = False

    def take_hidden(self, indices: Seq[int]) -> None:
        if indices:
            prepare_hidden(self.model, indices)
        self._hidden = tuple(indices)

    def _announce(self, packed: PackedInputs) -> None:
        self._told = self._group.say(Message(Kind.RUN, self._number, step_of(packed)))

    def _compute(self, plan: StepPlan, greedy: torch.Tensor | None = None) -> Computed:
        with self._group.in_step():
            if self._checksums is None:
                return super()._compute(plan, greedy)
            with self._checksums.compared(self._told):
                return super()._compute(plan, greedy)

    def commit(self, kept: Kept) -> None:
        super().commit(kept)
        self._note(Kind.COMMIT, kept)

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        super().release(request_ids)
        if request_ids:
            self._note(Kind.RELEASE, request_ids)

    def adopt_prefix(self, request_id: str, tokens: Seq[int], num_cached: int = 0) -> int:
        adopted = super().adopt_prefix(request_id, tokens, num_cached)
        if adopted != num_cached:
            self._note(Kind.ADOPT, (request_id, [*tokens], num_cached, adopted))
        return adopted

    def publish_prefix(self, request_id: str, tokens: Seq[int]) -> None:
        super().publish_prefix(request_id, tokens)
        self._note(Kind.PUBLISH, (request_id, [*tokens]))

    def forget_prefixes(self) -> None:
        super().forget_prefixes()
        self._note(Kind.FORGET)

    def _note(self, kind: Kind, value: Any = None) -> None:
        self._group.note(Message(kind, self._number, value))
