"""The parts that learn are held to what they were shown, and the choice of lengths to a search of all there are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
from emssd_adaptive.acceptance import Acceptance
from emssd_adaptive.policy import AdaptiveBudget
from emssd_adaptive.regression import FadingRegression
from emssd_adaptive.stage import StageRecord
from emssd_adaptive.step_time import StepTime
from hypothesis import given
from hypothesis import strategies as st

from emssd.drafting import BudgetStep, Draft
from emssd.sequences import Batch, Request, Row
from tests.support.budget_world import World

COEFFICIENTS = st.floats(0, 2, allow_subnormal=False).map(lambda value: round(value, 3))


@given(st.floats(0.1, 1), st.lists(COEFFICIENTS, min_size=1, max_size=3), st.integers(0, 2**16))
def test_regression_finds_coefficients_that_are_not_negative(start: float, slopes: list[float], seed: int) -> None:
    regression = FadingRegression(1 + len(slopes))
    assert not regression.is_known
    features = np.random.default_rng(seed).uniform(0, 2, (300, 1 + len(slopes)))
    features[:, 0] = 1.0
    seconds = features @ [start, *slopes]
    for row, value in zip(features, seconds, strict=True):
        regression.observe([*row], float(value))
    assert regression.is_known
    assert min(regression.coefficients) >= 0
    assert np.abs(features @ regression.coefficients / seconds - 1).max() < 0.05


def test_regression_follows_a_machine_that_becomes_slower() -> None:
    regression = FadingRegression(1, half_life=20)
    for seconds in [1.0] * 200 + [3.0] * 200:
        regression.observe([1.0], seconds)
    assert regression.coefficients[0] == pytest.approx(3.0, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 9000), st.floats(1e-4, 1)), min_size=1, max_size=80))
def test_step_time_is_convex_in_tokens_and_never_falls(stream: list[tuple[int, int, float]]) -> None:
    time = StepTime()
    assert not time.is_known
    for observation in stream:
        time.observe(*observation)
    assert time.is_known
    seconds = [time.seconds(num_tokens, 1000) for num_tokens in range(500)]
    rises = time.rises(0, 499)
    assert all(time.rises(start, 200) == rises[start : start + 200] for start in (1, 16, 60, 299))
    assert np.diff(seconds) == pytest.approx(rises, rel=1e-6, abs=1e-9)
    assert min(rises) >= 0
    assert rises == sorted(rises)
    assert all(time.seconds(num_tokens, 2000) >= before for num_tokens, before in enumerate(seconds))


def test_step_time_learns_a_curve_of_that_form() -> None:
    def truth(tokens: float, context: float) -> float:
        return 0.01 + 0.00015 * max(0, tokens - 64) + 1e-6 * context

    time, random = StepTime(), np.random.default_rng(0)
    for _ in range(400):
        tokens, context = int(random.integers(1, 200)), int(random.integers(100, 8000))
        time.observe(tokens, context, truth(tokens, context))
    for tokens, context in product([1, 30, 64, 100, 190], [200, 4000, 7900]):
        assert time.seconds(tokens, context) == pytest.approx(truth(tokens, context), rel=0.1)


def test_one_slow_step_of_a_rare_size_does_not_make_such_sizes_dear() -> None:
    time = StepTime()
    for tokens in [1, 4, 8, 16] * 20:
        time.observe(tokens, 100, 0.03)
    time.observe(17, 100, 0.09)
    for tokens in [1, 4, 8, 16] * 20:
        time.observe(tokens, 100, 0.03)
    assert time.seconds(20, 100) < 0.04, "four more tokens at the mean of the sixteen before them"
    assert time.rises(16, 4) == pytest.approx([0.03 / 16] * 4, rel=0.1)


def test_acceptance_learns_each_row_and_starts_new_ones_at_the_average() -> None:
    acceptance = Acceptance(16)
    for _ in range(60):
        acceptance.observe("good", 4, 4)
        acceptance.observe("bad", 4, 0)
    good, bad, new = acceptance.gains(["good", "bad", "new"], [4] * 3)
    assert good[0] > 0.7 > 0.6 > new[0] > 0.4 > 0.3 > bad[0]
    assert good[3] > 0.5
    acceptance.release(["good", "bad", "never seen"])
    assert acceptance.gains(["good", "bad"], [4, 4]) == [new, new]


def test_acceptance_follows_a_row_that_changes() -> None:
    acceptance = Acceptance(8)
    for accepted in [4] * 50 + [0] * 50:
        acceptance.observe("a", 4, accepted)
    assert acceptance.gains(["a"], [1])[0][0] < 0.25
    for _ in range(50):
        acceptance.observe("a", 4, 4)
    assert acceptance.gains(["a"], [1])[0][0] > 0.75


def steep(num_tokens: int) -> float:
    return 0.01 * num_tokens


def flat(num_tokens: int) -> float:
    return 0.05


def test_a_machine_that_was_busy_while_nothing_was_drafted_is_no_reason_to_go_on_drafting() -> None:
    random = np.random.default_rng(0)
    world = World(AdaptiveBudget(), 8, lambda tokens: 6 * steep(tokens), lambda row, drafted: 0)
    world.accepts = lambda row, drafted: min(drafted, int(random.geometric(0.4)) - 1)
    world.run(8, 0)
    world.seconds = steep
    world.run(8, 2)
    world.run(8, 7)
    kept = world.run(150, 7)[-50:]
    assert sum(map(sum, kept)) <= 4, "a drafted token takes as long as one that is sure, and is right in 6 of 10 cases"


def test_drafts_that_pay_are_left_out_ever_more_seldom_to_see_what_a_step_takes_without() -> None:
    world = World(AdaptiveBudget(probe_interval=8), 4, flat, lambda row, drafted: drafted).warm()
    plain = [step for step, kept in enumerate(world.run(520, 5)) if not any(kept)]
    assert [later - earlier for earlier, later in pairwise(plain)] == [17, 33, 65, 129, 129, 129]


def test_it_says_what_drafts_gain() -> None:
    world = World(AdaptiveBudget(), 4, flat, lambda row, drafted: 5)
    world.run(24, 5)
    assert world.policy.summary == ""
    world.run(200, 5)
    said = r"about [56]\.\d times as fast as without drafts, as budget=adaptive measures it"
    assert re.fullmatch(said, world.policy.summary)


def test_each_row_has_a_length_of_its_own() -> None:
    world = World(AdaptiveBudget(), 2, lambda tokens: 0.04 + 0.01 * tokens, lambda row, drafted: drafted if row else 0)
    kept = [lengths for lengths in world.warm().run(100, 5)[-60:] if any(lengths)]  # a few compare, without drafts
    assert len(kept) >= 58
    assert all(good >= 4 for _, good in kept)
    assert sum(bad for bad, _ in kept) < 0.3 * len(kept), "it is tried again now and then"


def probes(world: World, num_steps: int) -> list[int]:
    """Steps in which something was drafted."""
    return [step for step in range(num_steps) if any(world.step([5] * len(world.rows))[0])]


def test_probes_come_back_at_the_interval_that_doubles_up_to_16_times() -> None:
    world = World(AdaptiveBudget(probe_interval=4), 8, steep, lambda row, drafted: 0)
    world.warm().run(150, 5)
    probes(world, 4 * 31)  # until the backoff is at its largest
    seen = probes(world, 4 * 16 * 5)
    assert len(seen) in (4, 5)
    assert {later - earlier for earlier, later in pairwise(seen)} == {4 * 16}


class KnownTime(StepTime):
    """A curve that is given."""

    is_known = True  # type: ignore[assignment]  # a property in the original
    num_observed = 1000  # type: ignore[assignment]  # as above

    def __init__(self, curve: Seq[float]) -> None:
        super().__init__()
        self.curve = curve

    def seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        return self.curve[num_tokens]

    def rises(self, num_tokens: int, count: int) -> list[float]:
        return [after - before for before, after in pairwise(self.curve[num_tokens : num_tokens + count + 1])]


class KnownGains(Acceptance):
    """Gains that are given."""

    def __init__(self, table: Seq[Seq[float]]) -> None:
        super().__init__(16)
        self.table = table

    def gains(self, request_ids: Iterable[str], limits: Seq[int]) -> list[list[float]]:
        return [list(row[:limit]) for _, row, limit in zip(request_ids, self.table, limits, strict=True)]


class KnownRecord(StageRecord):
    """Times of drafting that are given."""

    seconds_per_level = seconds_per_token = 0.0  # type: ignore[assignment]  # properties in the original

    def __init__(self, gains: Seq[Seq[float]], per_level: float, per_token: float, catch_up: Seq[float] = ()) -> None:
        super().__init__(16, 1000)
        self.acceptance = KnownGains(gains)
        self.seconds_per_level, self.seconds_per_token = per_level, per_token
        self.catch_up = list(catch_up) or [0.0] * len(gains)

    def catch_up_seconds(self, lengths: Mapping[str, int]) -> list[float]:
        return self.catch_up


# In tenths: equal gains of several rows are the rule, not the exception.
CHAINS = st.lists(st.integers(0, 10).map(lambda tenths: tenths / 10), min_size=3, max_size=3)


@given(
    gains=st.lists(CHAINS.map(lambda chain: sorted(chain, reverse=True)), min_size=1, max_size=3),
    rises=st.lists(st.floats(0, 1), min_size=20, max_size=20).map(sorted),
    start=st.floats(0.1, 5),
    per_level=st.just(0.0) | st.floats(0.1, 2),
    per_token=st.floats(0, 1),
    data=st.data(),
)
def test_what_is_drafted_and_what_is_verified_has_the_best_rate_of_all_there_is(
    gains: list[list[float]], rises: list[float], start: float, per_level: float, per_token: float, data: st.DataObject
) -> None:
    curve = [start + rise for rise in accumulate(rises)]  # convex
    limits = [data.draw(st.integers(0, 3), label="limit") for _ in gains]
    policy = AdaptiveBudget()
    policy._time, policy._stages = KnownTime(curve), [KnownRecord(gains, per_level, per_token)]
    batch = Batch(tuple(Row(Request(str(i), (1,) * 10, 50), num_cached=9) for i in range(len(gains))))

    def rate(lengths: Seq[int], drafting: bool) -> float:
        gain = len(gains) + sum(sum(row[:length]) for row, length in zip(gains, lengths, strict=True))
        seconds = curve[len(gains) + sum(lengths)]
        return gain / (seconds + drafting * (per_level * max(lengths) + per_token * sum(lengths)))

    every = [*product(*(range(limit + 1) for limit in limits))]
    step = BudgetStep(batch, tuple(limits))
    drafted = policy.allot(step)
    best = max(every, key=lambda lengths: rate(lengths, drafting=True))
    assert rate(drafted, drafting=True) >= rate(best, drafting=True) * (1 - 1e-9), f"{drafted}, and {best} is better"

    verified = list(policy.trim(step, Draft.from_chains([[1] * limit for limit in limits])))
    best = max(every, key=lambda lengths: rate(lengths, drafting=False))
    assert rate(verified, drafting=False) >= rate(best, drafting=False) * (1 - 1e-9), f"{verified}; {best} is better"
    for lengths in (drafted, verified):
        assert all(0 <= length <= limit for length, limit in zip(lengths, limits, strict=True))


@given(st.floats(0, 3), st.floats(0, 1))
def test_a_row_that_takes_long_to_catch_up_with_is_left_alone(seconds: float, gain: float) -> None:
    policy = AdaptiveBudget()
    # A level's time is no reason here: where drafts of other rows pay, catching up with this one decides.
    policy._time, policy._stages = KnownTime([1.0] * 9), [KnownRecord([[gain] * 2, [1.0, 1.0]], 0.0, 0.0, [seconds, 0])]
    batch = Batch(tuple(Row(Request(str(i), (1,) * 10, 50), num_cached=9) for i in range(2)))
    expected = [2 if gain > 2 * seconds else 0, 2]  # 2 tokens per second without it
    assert policy.allot(BudgetStep(batch, (2, 2))) == expected


def test_nothing_is_known_at_first_and_little_is_drafted() -> None:
    assert World(AdaptiveBudget(), 2, flat, lambda row, drafted: 0).step([15, 0]) == ([2, 0], [2, 0])
