"""`LeadingRunner`: the runner of process 0, which has the others do what it does."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import torch

from emssd.attention import AttentionBackend, Kept, KVCacheSpec, PackedInputs, StepPlan
from emssd.errors import GroupError
from emssd.model.parallel.group import Message, step_of
from emssd.model.runner import CausalLMRunner
from emssd.model.target import Computed, TargetModel

__all__ = ["Checksums", "LeadingRunner"]


class Checksums:
    """`model.checksums=true`: compares the steps of one KV cache, in every process of a group at once.

    What is computed is compared where the LM head gets it: by then, every process has the same hidden states, to the
    last bit. After the LM head nothing could be seen, as the logits of all processes are put together.
    """

    def __init__(self, target: TargetModel) -> None:
        assert target.shard is not None, "a model that is whole has nobody to compare with"
        self._group, self._head, self._num_steps = target.shard.group, target.model.get_output_embeddings(), 0

    @contextmanager
    def compared(self, told: bytes) -> Iterator[None]:
        """A step inside this is compared when it is done. Raises GroupError: a process was told, or has computed,
        something else than process 0.
        """
        computed = list[int]()

        def note(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            computed.append(_checksum(arguments[0]))

        with self._head.register_forward_pre_hook(note):
            yield
        mine = zlib.crc32(told), *computed
        ours = self._group.gathered(mine)
        self._num_steps += 1
        for rank, theirs in enumerate(ours):
            if theirs != ours[0]:
                what = "was told something else" if theirs[0] != ours[0][0] else "has computed other hidden states"
                raise GroupError(f"model.checksums: in step {self._num_steps}, process {rank} {what} than process 0")


def _checksum(states: torch.Tensor) -> int:
    return zlib.crc32(states.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())


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
        self._checksums = Checksums(model) if model.shard.checksums else None
        self._note("make_cache", model.shard.number, recipe, spec)
        weakref.finalize(self, self._group.note, Message("drop", self._number)).atexit = False

    def _announce(self, packed: PackedInputs) -> None:
        self._told = self._group.say(Message("run", self._number, (step_of(packed),)))

    def _compute(self, plan: StepPlan) -> Computed:
        with self._group.in_step():
            if self._checksums is None:
                return super()._compute(plan)
            with self._checksums.compared(self._told):
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
