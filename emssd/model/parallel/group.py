"""`Group`: the processes that torchrun started, what process 0 tells the others, and what happens when one ends."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch

from emssd.attention import PackedInputs
from emssd.errors import ConfigError, EmssdError, GroupError

__all__ = ["Group", "Message", "Shard", "join", "packed_of", "step_of"]

_FRAME, _LENGTH = 32768, 8  # bytes of a broadcast, and of the number at its head; longer messages take several
_PASS_TIMEOUT = timedelta(minutes=30)  # of a forward pass; loading may be in it, and disks differ
_IDLE_TIMEOUT = timedelta(days=365)  # process 0 may have nothing to say for long
_BEAT_SECONDS, _BEAT_TIMEOUT, _GRACE_SECONDS = 1.0, timedelta(seconds=30), 5.0
_FROM_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ENDED = "another process of this tensor parallel run has ended, or hangs; rows that were finished are kept"


class Message(NamedTuple):
    """A call that the other processes make of the model, or the cache, of a number.

    Attributes:
        call: a method of `emssd.model.parallel.follower` or of the cache's runner; ``end`` for nothing more.
        arguments: of that method; they hold no tensors.
    """

    call: str
    number: int
    arguments: tuple[Any, ...] = ()


class Group:
    """The processes of one tensor parallel run, by torch.distributed. Made once in a process, by `join`.

    Three groups of torch.distributed have the same members. The default one is that of the model's own collectives.
    Over the second, process 0 tells the others what to do, in tensors of one size. Over the third, a thread of each
    process hears every second that all are alive.

    Attributes:
        rank: of this process; 0 decides.
        is_broken: what the processes do is no longer in step, so nothing is said any more.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self.device = _init_process_group()
        self.rank, self.size, self.is_broken = dist.get_rank(), dist.get_world_size(), False
        if self.size < 2:
            raise ConfigError(
                "model.tensor_parallel=true spreads a model over processes, and there is one; start it with torchrun "
                "--nproc-per-node 2 or more, or leave model.tensor_parallel out"
            )
        self._dist = dist
        self._orders = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
        self._beats = dist.new_group(backend="gloo", timeout=_BEAT_TIMEOUT)
        self._pending: list[Message] = []
        self._num_made = 0
        self._leaves = threading.Event()
        self._watch = threading.Thread(target=self._hear_others, name="emssd-alive", daemon=True)
        self._watch.start()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_termination)
        atexit.register(self.close)

    def number(self) -> int:
        self._num_made += 1
        return self._num_made

    def note(self, message: Message) -> None:
        """Say this together with what is said next."""
        if not self.is_broken:
            self._pending.append(message)

    def say(self, message: Message) -> None:
        """Process 0: tell the others everything that is noted, and this."""
        if self.is_broken:
            raise GroupError("an earlier step of this tensor parallel run failed, so the run must be started again")
        noted, self._pending = self._pending, []
        data = pickle.dumps([*noted, message])
        with self.in_step():
            for start in range(0, len(data), _FRAME - _LENGTH):
                left = (len(data) - start).to_bytes(_LENGTH, "little")
                part = left + data[start : start + _FRAME - _LENGTH]
                frame = torch.frombuffer(bytearray(part.ljust(_FRAME, b"\0")), dtype=torch.uint8)
                self._dist.broadcast(frame, 0, group=self._orders)

    def hear(self) -> list[Message]:
        """The others: what process 0 says next. Raises GroupError: it has ended."""
        data, frame = b"", torch.zeros(_FRAME, dtype=torch.uint8)
        with self.in_step():
            while True:
                self._dist.broadcast(frame, 0, group=self._orders)
                head, part = bytes(frame[:_LENGTH].tolist()), frame[_LENGTH:].numpy().tobytes()
                left = int.from_bytes(head, "little")
                data += part[:left]
                if left <= len(part):
                    messages: list[Message] = pickle.loads(data)
                    return messages

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, by rank. All must call this. Raises GroupError: one of them has ended."""
        values: list[Any] = [None] * self.size
        with self.in_step():
            self._dist.all_gather_object(values, value, group=self._orders)
        return values

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """The body succeeds in every process, or is an error in every process."""
        fault: EmssdError | None = None
        try:
            yield
        except EmssdError as error:
            fault = error
        said = self.gathered(None if fault is None else str(fault))
        if fault is not None:
            raise fault
        for rank, text in enumerate(said):
            if text is not None:
                raise ConfigError(f"process {rank} cannot do what process 0 can: {text}")

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """For what all processes do together. If it fails here, the others wait in vain, so nothing is said any more.
        Raises GroupError: the connection to another process is lost.
        """
        try:
            yield
        except BaseException as error:
            self.is_broken = True
            if isinstance(error, self._dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
                raise GroupError(_ENDED) from error
            raise

    def close(self) -> None:
        """Let the others end, if they can still hear it, and this process end without waiting for them."""
        if self._leaves.is_set():
            return
        if self.rank == 0 and not self.is_broken:
            try:
                self.say(Message("end", 0))
            except GroupError as error:
                print(f"emssd: {error}", file=sys.stderr)
        self._leaves.set()
        self._watch.join(2 * _BEAT_SECONDS)
        if not self.is_broken:
            self._dist.destroy_process_group()

    def _hear_others(self) -> None:
        """Ends this process if another one ends while this one waits for it in a way that no error can end."""
        while True:
            leaves = self._leaves.wait(_BEAT_SECONDS)
            if leaves and self.is_broken:
                return
            last = torch.tensor([int(leaves)])
            try:
                self._dist.all_reduce(last, op=self._dist.ReduceOp.MAX, group=self._beats)
            except RuntimeError:
                break
            if last.item():
                return
        if not self._leaves.wait(_GRACE_SECONDS):
            print(f"emssd: error: {_ENDED}", file=sys.stderr, flush=True)
            os._exit(2)

    def _on_termination(self, *_: object) -> None:
        """Torchrun tells every process to end when one has; if that is known here, there is an error already."""
        if not self.is_broken:
            self.is_broken = True
            raise GroupError(
                "this process was told to end, as torchrun does when another one has ended; rows that were finished "
                "are kept"
            )


@dataclass(frozen=True, slots=True)
class Shard:
    """The place of a shard among those of its model, which has a `number` in what process 0 says."""

    group: Group
    number: int

    @contextmanager
    def together(self, call: str, *arguments: Any) -> Iterator[None]:
        """Within, process 0 calls its shard, and has told the others to make this `call` of theirs."""
        if self.group.rank:
            yield
            return
        self.group.say(Message(call, self.number, arguments))
        with self.group.in_step():
            yield


_Step = tuple[Any, ...]
"""The fields of `PackedInputs`, with lists in the place of tensors; it pickles in a twentieth of their time."""


def step_of(packed: PackedInputs) -> _Step:
    """A step, with all of its tokens; those that only a device knows are fetched."""
    token_ids = packed.input_ids
    if packed.drafted is not None:
        token_ids = token_ids.index_copy(0, packed.drafted.places, packed.drafted.token_ids.to(token_ids.device))
    inputs = token_ids.tolist(), packed.position_ids.tolist(), packed.logit_rows.tolist()
    return packed.request_ids, *inputs, packed.qo_indptr, packed.kv_lens, packed.trees


def packed_of(step: _Step) -> PackedInputs:
    """The step that `step_of` was given."""
    request_ids, token_ids, position_ids, logit_rows, qo_indptr, kv_lens, trees = step
    tokens, positions, logits = (torch.tensor(x, dtype=torch.int64) for x in (token_ids, position_ids, logit_rows))
    return PackedInputs(request_ids, tokens, positions, qo_indptr, kv_lens, logits, trees)


@cache
def join() -> Group:
    """The group of this process, which the first call joins."""
    return Group()


def _init_process_group() -> torch.device:
    """Join the processes that torchrun started, unless the program has done so. Returns this process's device."""
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator()  # by which Transformers goes; of this build, present or not
    on_gpu = accelerator is not None
    if accelerator is not None and (accelerator.type != "cuda" or not torch.cuda.is_available()):
        raise ConfigError(
            f"model.tensor_parallel=true runs on CUDA GPUs, or on a CPU with a PyTorch for CPUs alone; this one is for "
            f"{accelerator.type}, and there is no GPU that it can use here"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if dist.is_initialized():
        return device
    if missing := [name for name in _FROM_TORCHRUN if name not in os.environ]:
        raise ConfigError(
            f"model.tensor_parallel=true needs the processes that torchrun starts, and {missing[0]} is not set; write "
            f"torchrun --nproc-per-node 2 -m emssd … in the place of python -m emssd …"
        )
    if on_gpu and local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"torchrun started a process {local_rank} on this machine, which has {torch.cuda.device_count()} GPUs; "
            f"each process takes one, so lower --nproc-per-node"
        )
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_PASS_TIMEOUT, device_id=device if on_gpu else None)
    return device
