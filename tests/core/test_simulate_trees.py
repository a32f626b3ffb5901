"""Token trees through the simulated engine: what is accepted is what the law says, and a policy takes what pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emssd.decoding.scheduler import ContinuousScheduler
from emssd.drafting.budget import FixedBudget
from emssd.plugins.registry import Registry
from emssd.simulate import Simulator, TreeLaw, geometric_trace
from emssd.simulate.curves import StepCurve
from emssd.simulate.simulator import Simulation, warm_up
from emssd.simulate.trace_drafter import TreeDrafter

TRACE = geometric_trace(0.5, 24, num_speculative_tokens=4, num_prompt=8, max_new_tokens=64)


class Steep(StepCurve):
    """A machine on which 20 tokens take twice as long as none, and drafting nothing."""

    def verify_seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        return 1.0 + num_tokens / 20

    def draft_seconds(self, stage: int, depth: int, num_tokens: int, num_kv_tokens: int) -> float:
        return 0.0


def run(law: TreeLaw, policy: str, *, tells: bool = False, num_tokens: int | None = None) -> Simulation:
    if policy == "fixed":
        budget = FixedBudget(num_tokens)
    else:
        spec = Registry().find("budget", policy)
        budget = spec.build(spec.config())
    drafters = [TreeDrafter(TRACE, law, tells=tells)]
    warm_up(budget, TRACE, lambda: ContinuousScheduler(8), Steep(), drafters)
    return Simulator(TRACE, ContinuousScheduler(8), budget, Steep(), drafters=drafters).run()


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 12), st.integers(0, 9))
def test_what_is_accepted_is_what_the_law_says(branches: list[int], num_tokens: int, seed: int) -> None:
    law = TreeLaw(branches, [[0.5, 0.3, 0.1]], seed)
    simulation = run(law, "fixed", num_tokens=num_tokens)
    for row in simulation.sequences:
        position = steps = 0
        while position < 64:
            right, way = law.right(row.request_id, position)[:num_tokens], -1
            depth = 0
            while children := [n for n, ok in enumerate(right) if ok and law.parents[n] == way]:
                (way,), depth = children, depth + 1
            position, steps = position + min(depth, 64 - position - 1) + 1, steps + 1
        assert row.num_steps == steps
    assert simulation.report.num_new_tokens == 24 * 64


@pytest.mark.parametrize("tells", [False, True])
def test_adaptive_takes_of_trees_what_pays(tells: bool) -> None:
    good, chain = TreeLaw([3, 2, 2], [[0.6, 0.25, 0.05]]), TreeLaw([1, 1, 1], [[0.6]])
    adaptive = run(good, "adaptive", tells=tells).report.tokens_per_second
    assert adaptive > run(good, "fixed").report.tokens_per_second
    assert adaptive > run(good, "fixed", num_tokens=0).report.tokens_per_second
    assert adaptive > 0.97 * run(chain, "adaptive", tells=tells).report.tokens_per_second


@pytest.mark.parametrize("tells", [False, True])
def test_hopeless_trees_are_nearly_plain_decoding(tells: bool) -> None:
    hopeless = TreeLaw([3, 3, 3], [[0.02]])
    simulation, plain = run(hopeless, "adaptive", tells=tells), run(hopeless, "fixed", num_tokens=0)
    assert simulation.report.tokens_per_second > 0.95 * plain.report.tokens_per_second
    assert simulation.report.num_drafted < 0.05 * run(hopeless, "fixed").report.num_drafted
