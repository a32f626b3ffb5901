"""Tensor parallel: the ranks that torchrun started run the same program, each with its shard of the model."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from typing import Any, TypeVar, cast

import torch

from emssd.attention import PackedInputs
from emssd.errors import ConfigError, EmssdError, GroupError

__all__ = ["Group", "join"]

_TIMEOUT = timedelta(minutes=30)  # loading may take so much longer from one disk than from another
_GRACE_SECONDS = 5.0
_MOST_NUMBERS = 31  # of an exchange
_FROM_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ENDED = "another process of this tensor parallel run has ended, or hangs; rows that were finished are kept"
_DIFFER = (
    "the processes of this tensor parallel run do not do the same, so it cannot go on; each must make the same calls "
    "with the same prompts, and neither a drafter nor a budget policy may read a clock or draw at random by itself"
)
_END = "end"
_Result = TypeVar("_Result")


class Group:
    """The ranks of a run, which do the same at the same time. A rank that is alone exchanges nothing.

    An exchange is one tensor of always the same size, with a digest of the rank's next action. So ranks whose actions
    differ find out, and none waits in vain.

    Args:
        ranks: their `torch.distributed.ProcessGroup` for tensors on the host.

    Attributes:
        rank: of this process. Rank 0 reads, writes and prints, and its clocks hold for all.
        is_broken: this rank failed while others wait for it, or has lost them.
    """

    def __init__(self, ranks: Any = None) -> None:
        self._ranks = ranks
        self.rank: int = 0 if ranks is None else ranks.rank()
        self.size: int = 1 if ranks is None else ranks.size()
        self.is_broken = False

    @contextmanager
    def step(self, packed: PackedInputs) -> Iterator[None]:
        """Within, all ranks compute `packed`. Raises GroupError: their steps differ, before anything is computed."""
        token_ids = packed.input_ids
        if packed.drafted is not None:
            token_ids = token_ids.index_copy(0, packed.drafted.places, packed.drafted.token_ids.to(token_ids.device))
        tensors = token_ids.tolist(), packed.position_ids.tolist(), packed.logit_rows.tolist()
        with self._in_step():
            self._exchange((packed.request_ids, *tensors, packed.qo_indptr, packed.kv_lens, packed.trees))
            yield

    def first(self, numbers: Seq[float]) -> list[float]:
        """The `numbers` of rank 0; all ranks have equally many."""
        return self._exchange("numbers", numbers)[0]

    def least(self, number: int) -> int:
        return int(min(numbers[0] for numbers in self._exchange("number", [number])))

    def made_by_first(self, make: Callable[[], _Result]) -> _Result:
        """The result of `make`, which rank 0 alone calls; an error in rank 0 is one in all."""
        with self.agreed():
            result = make() if self.rank == 0 else None
        return cast("_Result", self._gathered(result)[0])

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """The body succeeds in all ranks, or is an error in all."""
        try:
            yield
        except EmssdError as error:
            self._gathered(str(error))
            raise
        for rank, message in enumerate(self._gathered(None)):
            if message is not None:
                raise ConfigError(f"process {rank} cannot do what process {self.rank} can: {message}")

    def close(self) -> None:
        """Wait until all ranks are here: torchrun ends the others when one ends with an error."""
        with suppress(GroupError):
            if not self.is_broken:
                self._exchange(_END)

    def _gathered(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        self._exchange("value")
        values: list[Any] = [None] * self.size
        with self._in_step():
            dist.all_gather_object(values, value, group=self._ranks)
        return values

    def _exchange(self, action: object, numbers: Seq[float] = ()) -> list[list[float]]:
        """The `numbers` of all ranks. Raises GroupError: the `action` of another rank differs."""
        if self.size == 1:
            return [[*numbers]]
        if self.is_broken:
            raise GroupError("an earlier step of this tensor parallel run failed, so the run must be started again")
        digest = _digest(action)
        message = torch.zeros(1 + _MOST_NUMBERS, dtype=torch.float64)
        message[: 1 + len(numbers)] = torch.tensor([digest, *numbers], dtype=torch.float64)
        messages = [torch.empty_like(message) for _ in range(self.size)]
        with self._in_step():
            self._ranks.allgather([messages], [message]).wait()
            if (digests := {int(other[0]) for other in messages}) != {digest}:
                raise GroupError(_ENDED if _digest(_END) in digests else _DIFFER)
        return [other[1 : 1 + len(numbers)].tolist() for other in messages]

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """For actions of all ranks; after a failure this rank is broken. Raises GroupError: another rank is lost."""
        try:
            yield
        except BaseException as error:
            self.is_broken = True
            lost = isinstance(error, torch.distributed.DistError)
            if lost or (isinstance(error, RuntimeError) and "gloo" in str(error)):
                raise GroupError(_ENDED) from error
            raise


def _digest(action: object) -> int:
    """A number that a float64 holds, by the text of an action."""
    return int.from_bytes(blake2b(repr(action).encode(), digest_size=6).digest())


@cache
def join() -> Group:
    """The group of the processes that torchrun started, which the first call joins."""
    import torch.distributed as dist

    _init_process_group()
    if dist.get_world_size() < 2:
        raise ConfigError(
            "model.tensor_parallel=true spreads a model over processes, and there is one; start it with torchrun "
            "--nproc-per-node 2 or more, or leave model.tensor_parallel out"
        )
    group = Group(dist.new_group(backend="gloo", timeout=_TIMEOUT))
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _end_by_sentence()

    @atexit.register
    def leave() -> None:
        group.close()
        if not group.is_broken:
            dist.destroy_process_group()

    return group


def _end_by_sentence() -> None:
    """End this process some seconds after SIGTERM, which torchrun sends when another process has ended.

    It should have ended by a GroupError then, but NCCL may wait for ever.
    """

    def end() -> None:
        while signal.SIGTERM not in os.read(signals, 1):
            pass
        time.sleep(_GRACE_SECONDS)
        print(f"emssd: error: {_ENDED}", file=sys.__stderr__, flush=True)
        os._exit(2)

    signals, written = os.pipe()
    os.set_blocking(written, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    threading.Thread(target=end, name="emssd-end", daemon=True).start()


def _init_process_group() -> None:
    """Join the processes that torchrun started, unless the program has done so."""
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator()  # by which Transformers goes; of this build, present or not
    on_gpu = accelerator is not None
    if accelerator is not None and (accelerator.type != "cuda" or not torch.cuda.is_available()):
        raise ConfigError(
            f"model.tensor_parallel=true runs on CUDA GPUs, or on a CPU with a PyTorch for CPUs alone; this one is for "
            f"{accelerator.type}, and there is no GPU that it can use here"
        )
    if dist.is_initialized():
        return
    if missing := [name for name in _FROM_TORCHRUN if name not in os.environ]:
        raise ConfigError(
            f"model.tensor_parallel=true needs the processes that torchrun starts, and {missing[0]} is not set; write "
            f"torchrun --nproc-per-node 2 -m emssd … in the place of python -m emssd …"
        )
    if not on_gpu:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"torchrun started a process {local_rank} on this machine, which has {torch.cuda.device_count()} GPUs; "
            f"each process takes one, so lower --nproc-per-node"
        )
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=_TIMEOUT, device_id=torch.device("cuda", local_rank))
