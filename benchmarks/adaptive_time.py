"""What `budget=adaptive` itself takes of a step: microseconds in its hooks, by batch size and drafter.

    python benchmarks/adaptive_time.py

Engine, scheduler and drafting stages are the real ones, over the simulator's made-up requests and step times; those
stray by some per cent, as measured ones do, since what is learnt from equal steps costs less. ``allot``, ``trim`` and
``observe`` are counted in seconds of the thread's own, the clock's time taken off; other processes are not in them.
A run's figure is the mean over its steps, behind those in which the policy still looks around; the table shows the
smallest of several runs.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from emssd.decoding.scheduler import ContinuousScheduler
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Drafter, Outcome, StepStats
from emssd.simulate import Simulator, TreeDrafter, TreeLaw, geometric_trace
from emssd.simulate.commands import make_budget
from emssd.simulate.curves import StepCurve
from emssd.simulate.trace_drafter import TraceDrafter
from emssd.simulate.traces import Trace

BATCH_SIZES = (1, 4, 8, 16, 32)
DEPTH, PROMPT = 7, 64  # tokens
NOISE = 0.03  # of a step's seconds
CHANCES = {"drafts pay": 0.7, "nothing pays": 0.05}  # of a drafted token, given those before it
TREE = (2, 2, 2, 1)  # 2 + 4 + 8 + 8 nodes, of which the likeliest 16 may be drafted
NODES = 16
WARM_UP, STEPS = 200, 600

_T = TypeVar("_T")


class TimedPolicy(BudgetPolicy):
    """Asks another policy, and counts what that takes.

    Attributes:
        seconds: of each hook, by step; those of a step's stages are added.
    """

    def __init__(self, inner: BudgetPolicy) -> None:
        self._inner, self.max_depth = inner, inner.max_depth
        self.seconds: list[dict[str, float]] = []

    def allot(self, step: BudgetStep) -> Seq[int]:
        if step.is_first:
            self.seconds.append(dict.fromkeys(("allot", "trim", "observe"), 0.0))
        return self._timed("allot", lambda: self._inner.allot(step))

    def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
        return self._timed("trim", lambda: self._inner.trim(step, draft))

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        self._timed("observe", lambda: self._inner.observe(outcome, stats))

    def _timed(self, name: str, call: Callable[[], _T]) -> _T:
        start = time.thread_time_ns()
        found = call()
        self.seconds[-1][name] += (time.thread_time_ns() - start - CLOCK) / 1e9
        return found


def _clock() -> int:
    """Nanoseconds between two looks at the clock."""
    found = []
    for _ in range(1000):
        start = time.thread_time_ns()
        found.append(time.thread_time_ns() - start)
    return sorted(found)[len(found) // 2]


CLOCK = _clock()


@dataclass(frozen=True)
class NoisyCurve(StepCurve):
    """A step of a small model on a CPU, in seconds, that strays.

    Attributes:
        per_level: seconds of a level of drafts.
        random: of the noise.
    """

    per_level: float
    random: np.random.Generator

    def verify_seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        return (6e-3 + 0.15e-3 * num_tokens) * (1.0 + NOISE * abs(float(self.random.normal())))

    def draft_seconds(self, stage: int, depth: int, num_tokens: int, num_kv_tokens: int) -> float:
        return (self.per_level * depth + 2e-6 * num_tokens) * (1.0 + NOISE * abs(float(self.random.normal())))


class CappedTrees(TreeDrafter):
    """Trees of `NODES` nodes."""

    def __init__(self, trace: Trace, law: TreeLaw) -> None:
        super().__init__(trace, law, tells=True)
        self.num_speculative_tokens = NODES


def drafter_of(kind: str, trace: Trace, chance: float) -> tuple[Drafter, float]:
    """A drafter, and the seconds of a level of its drafts."""
    if kind == "llma":
        return TraceDrafter(trace), 0.0
    if kind == "draft_model":
        return TraceDrafter(trace), 0.5e-3
    return CappedTrees(trace, TreeLaw(TREE, [[0.7 * chance, 0.3 * chance]])), 0.5e-3


def run(kind: str, chance: float, batch_size: int, num_steps: int) -> dict[str, float]:
    """Mean microseconds of each hook in a step, and how many tokens were drafted for a row."""
    trace = geometric_trace(
        chance, batch_size, num_speculative_tokens=DEPTH, num_prompt=PROMPT, max_new_tokens=(WARM_UP + num_steps) * 8
    )
    drafter, per_level = drafter_of(kind, trace, chance)
    policy = TimedPolicy(make_budget("adaptive", []))
    simulator = Simulator(
        trace,
        ContinuousScheduler(batch_size, 4096),
        policy,
        NoisyCurve(per_level, np.random.default_rng(0)),
        drafters=[drafter],
    )
    simulator.run(WARM_UP)
    done = simulator.run(num_steps)
    assert len(done.steps) == num_steps
    assert done.steps[-1].num_rows == batch_size, "rows have ended"
    seconds = policy.seconds[-num_steps:]
    found = {name: 1e6 * sum(step[name] for step in seconds) / num_steps for name in seconds[0]}
    drafted = sum(sum(step.drafted) for step in done.steps) / num_steps / batch_size
    return found | {"sum": sum(found.values()), "drafted": drafted}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    columns = ("allot", "trim", "observe", "sum")
    table = Table("drafts", "", "batch", *columns, "drafted a row", title=f"µs per step, {platform.machine()}")
    for kind in ("llma", "draft_model", f"tree of {NODES}"):
        for name, chance in CHANCES.items():
            for batch_size in options.batch_sizes:
                runs = [run(kind, chance, batch_size, options.steps) for _ in range(options.repeats)]
                best = min(runs, key=lambda each: each["sum"])
                figures = (f"{best[column]:.0f}" for column in columns)
                table.add_row(kind, name, str(batch_size), *figures, f"{best['drafted']:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
