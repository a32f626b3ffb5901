"""The work of other processes during a measurement: figures of a busy machine are not those of a quiet one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["BUSY_SHARE", "OtherProcesses", "busy_remark", "cpu_times"]

BUSY_SHARE = 0.1
"""The share of all cores; if other processes use more, a run warns that the machine was busy."""

_SHORTEST = 0.5  # seconds: below, the hundredths of a second in which systems count are too coarse
_LEAST_COUNTED = 0.5  # of the time that passed on all cores: a system that accounts for less does not really count


@dataclass(frozen=True, slots=True)
class CPUTimes:
    """Seconds so far, of the clock, and of the cores that this process may use.

    Attributes:
        busy, idle: of these cores, in all processes.
        own: of this process, and of its children that have ended.
    """

    clock: float
    cores: int
    busy: float
    idle: float
    own: float


def cpu_times(*, siblings: bool = False) -> CPUTimes:
    """As the system counts them now; given `siblings`, all processes of this one's parent count as its own."""
    import psutil

    cores = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity"):  # Linux: a run that was given a few of many cores competes for those alone
        usable = os.sched_getaffinity(0)
        cores = [core for number, core in enumerate(cores) if number in usable] or cores
    idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
    # The time of guests is counted for their host's processes, too.
    total = sum(sum(core) - getattr(core, "guest", 0.0) - getattr(core, "guest_nice", 0.0) for core in cores)
    used = 0.0
    for process in psutil.Process(os.getppid()).children() if siblings else [psutil.Process()]:
        with suppress(psutil.NoSuchProcess):
            used += sum(value for name, value in process.cpu_times()._asdict().items() if name != "iowait")
    return CPUTimes(time.perf_counter(), len(cores), total - idle, idle, used)


def busy_remark(*runs: Mapping[str, Any]) -> str | None:
    """The sentence that ends a run on a busy machine, of the metrics of `runs`; ``None`` for a quiet machine."""
    share = max((run.get("other_cpu_share") or 0.0 for run in runs), default=0.0)
    if share <= BUSY_SHARE:
        return None
    return f"the machine was busy: other processes used {share:.0%} of its cores, so its times may mislead"


class OtherProcesses:
    """The cores that other processes use while the body of a ``with`` statement runs.

    Attributes:
        share: of all cores, 0 to 1; ``None`` where it was too short to tell, or the system does not count.
    """

    def __init__(self, read: Callable[[], CPUTimes] = cpu_times) -> None:
        self._read = read
        self.share: float | None = None

    def __enter__(self) -> OtherProcesses:
        self._start = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        start, end = self._start, self._read()
        seconds = (end.clock - start.clock) * end.cores
        busy, idle = end.busy - start.busy, end.idle - start.idle
        if end.clock - start.clock >= _SHORTEST and busy + idle >= _LEAST_COUNTED * seconds:
            self.share = min(max((busy - (end.own - start.own)) / seconds, 0.0), 1.0)
