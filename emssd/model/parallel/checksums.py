"""`model.checksums=true`: the processes of a tensor parallel run compare what they were told and what they computed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from emssd.errors import GroupError
from emssd.model.target import TargetModel

__all__ = ["Checksums"]


class Checksums:
    """Compares the steps of one KV cache, in every process of a group at once.

    What is computed is compared where the LM head gets it: by then, every process has the same hidden states, to the
    last bit. Behind the LM head nothing could be seen, as the logits of all processes are put together.
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

        hook = self._head.register_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()
        mine = zlib.crc32(told), *computed
        ours = self._group.gathered(mine)
        self._num_steps += 1
        for rank, theirs in enumerate(ours):
            if theirs != ours[0]:
                what = "was told something else" if theirs[0] != ours[0][0] else "has computed other hidden states"
                raise GroupError(f"model.checksums: in step {self._num_steps}, process {rank} {what} than process 0")


def _checksum(states: torch.Tensor) -> int:
    return zlib.crc32(states.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
