"""The policy drafts what pays, on machines and with drafters that are made up; its choices are held to a search."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate, product
from unittest.mock import patch

import numpy as np
import pytest
from emssd_adaptive.drafter import DrafterRecord
from emssd_adaptive.policy import AdaptiveBudget, best_lengths
from hypothesis import example, given
from hypothesis import strategies as st

from emssd.drafting import BudgetStep, Draft
from emssd.sequences import Batch, Request, Row
from tests.support.budget_world import Curve, TreeWorld, World
from tests.support.tiers import looped

# In tenths: equal worths are the rule, not the exception.
WORTHS = st.lists(st.lists(st.integers(0, 10).map(lambda tenths: tenths / 10), max_size=4), min_size=1, max_size=3)
RISES = st.lists(st.floats(0, 1), min_size=12, max_size=12)


@example(worths=[[0.9, 0.9]], rises=[1.0, *[0.0] * 11], prices=[0.0] * 3, fall=True)
@given(worths=WORTHS, rises=RISES, prices=st.lists(st.floats(0, 0.5), min_size=3, max_size=3), fall=st.booleans())
def test_no_other_first_nodes_bring_more_where_worths_fall_or_rises_are_equal(
    worths: list[list[float]], rises: list[float], prices: list[float], fall: bool
) -> None:
    worths = [sorted(row, reverse=True) for row in worths] if fall else worths
    rises, prices = rises if fall else rises[:1] * 12, prices[: len(worths)]

    def brings(lengths: Seq[int]) -> float:
        rows = zip(worths, lengths, prices, strict=True)
        return sum(sum(row[:length]) - price * length for row, length, price in rows) - sum(rises[: sum(lengths)])

    lengths = best_lengths(worths, rises, prices)
    every = product(*(range(len(row) + 1) for row in worths))
    assert brings(lengths) >= max(map(brings, every)) - 1e-9


def line(start: float, per_token: float) -> Curve:
    return lambda num_tokens: start + per_token * num_tokens


steep, flat, rising, gentle = line(0, 0.01), line(0.05, 0), line(0.02, 0.004), line(0.05, 0.001)


def batch_of(*lengths: int) -> Batch:
    return Batch(
        tuple(Row(Request(str(i), (1,) * length, 10**6), num_cached=length - 1) for i, length in enumerate(lengths))
    )


def policy_of(
    first: Seq[float], later: float, *, per_token: float = 0.0, per_level: float = 0.0, per_unseen: float = 0.0,
    per_pair: float = 0.0,
) -> AdaptiveBudget:  # fmt: skip
    """A policy that knows chances and costs: a plain step takes a second, and `per_token` for each row."""
    policy = AdaptiveBudget()
    policy._cost.line.num_seen = 1000
    policy._cost.line.coefficients = [1.0, 0.0, 0.0, per_pair, per_token, *[0.0] * 7]
    policy._most = 100
    policy._records[0].num_drafts = 10**9
    policy._last_control = policy._records[0].next_try = math.inf
    policy._records[0].cost.coefficients = [0.0, per_level, 0.0, per_unseen]
    for index, chance in enumerate(first):
        counts = policy._records[0].counts[str(index)]
        counts.right[:2], counts.tried[:2] = [1e9 * later, 1e9 * chance], [1e9, 1e9]
    return policy


@given(
    st.lists(st.integers(1, 9).map(lambda tenths: tenths / 10), min_size=1, max_size=3),
    st.sampled_from([0.3, 0.6, 0.9]),
    st.sampled_from([0.0, 0.1, 0.25]),
    st.sampled_from([0.0, 0.1, 0.3]),
    st.data(),
)
def test_the_lengths_of_drafts_that_are_yet_to_be_made_bring_more_than_all_others(
    first: list[float], later: float, per_token: float, per_level: float, data: st.DataObject
) -> None:
    limits = [data.draw(st.integers(0, 4), label="limit") for _ in first]
    policy, batch = policy_of(first, later, per_token=per_token, per_level=per_level), batch_of(*[10] * len(first))
    lengths = policy.allot(BudgetStep(batch, tuple(limits)))
    price = policy._rate * policy._cost.rises(1, 1)[0]

    def brings(lengths: Seq[int]) -> float:
        worths = [chance * later**depth for chance, n in zip(first, lengths, strict=True) for depth in range(n)]
        return sum(worths) - price * sum(lengths) - policy._rate * per_level * max(lengths)

    assert brings(lengths) >= max(map(brings, product(*(range(limit + 1) for limit in limits)))) - 1e-6


def test_a_drafter_that_has_to_catch_up_with_a_row_leaves_it_alone() -> None:
    assert policy_of([0.9, 0.9], 0.9, per_unseen=0.03).allot(BudgetStep(batch_of(4, 40), (2, 2))) == [2, 0]


@pytest.mark.parametrize(("gain", "length"), [(1.5, 2), (3.0, 4)])
def test_where_nothing_pays_at_the_rate_of_the_run_that_of_a_plain_step_counts(gain: float, length: int) -> None:
    policy = policy_of([0.9], 0.9, per_level=0.5)
    policy._gain = gain
    assert policy.allot(BudgetStep(batch_of(10), (4,))) == [length]


@pytest.mark.parametrize(("num_drafts", "length"), [(1, 1), (1000, 0)])
def test_a_draft_that_was_slow_is_not_the_last_if_it_was_the_first(num_drafts: int, length: int) -> None:
    policy = policy_of([0.6], 0.0, per_level=1.0)
    policy._records[0].num_drafts = num_drafts
    assert policy.allot(BudgetStep(batch_of(10), (4,))) == [length]


def test_beside_prompts_drafts_pay_as_elsewhere() -> None:
    policy = policy_of([0.05, 0.05], 0.9)
    policy._cost.line.coefficients[7] = 0.5  # for each token beyond 32
    new = Row(Request("1", (1,) * 100, 10**6))
    step = BudgetStep(Batch((*batch_of(10).rows, new)), (4, 4), num_other_tokens=200)
    assert policy.allot(step) == [4, 4]


def test_a_long_row_drafts_less_and_a_model_that_drafts_is_not_run_where_reading_kv_takes_the_time() -> None:
    policy = policy_of([0.9, 0.9], 0.7, per_pair=1e-4)
    short, long = policy.allot(BudgetStep(batch_of(10, 1500), (8, 8)))
    assert short == 8 > long > 0
    assert policy.allot(BudgetStep(batch_of(9000, 9000), (8, 8))) == [0, 0]


def drafts_by_chance(chance: float, seed: int = 0) -> Callable[[int, int], int]:
    random = np.random.default_rng(seed)
    return lambda row, drafted: min(drafted, int(random.geometric(1 - chance)) - 1)


@pytest.mark.parametrize("num_rows", [1, 8, 100])
def test_steps_grow_by_four_tokens_or_an_eighth_as_nothing_is_known_of_larger_ones(num_rows: int) -> None:
    world = World(AdaptiveBudget(), num_rows, flat, lambda row, drafted: drafted)
    sizes = [num_rows + sum(lengths) for lengths in world.run(12, 100)]
    assert sizes[0] == num_rows
    accepted = [0, *(size - num_rows for size in sizes)]
    largest = list(accumulate(sizes, max))
    assert all(
        size <= most + max(4, most // 8) + right
        for size, most, right in zip(sizes[1:], largest, accepted[1:], strict=False)
    )
    assert max(sizes) > 100 * num_rows / 3, "all are right"


@pytest.mark.parametrize("num_rows", [4, 8, 32])
def test_the_first_hundred_steps_are_hardly_slower_than_without_drafts(num_rows: int) -> None:
    world = World(AdaptiveBudget(), num_rows, rising, drafts_by_chance(0.02))
    world.run(100, 5)
    assert world.tokens / world.time > 0.99 * num_rows / rising(num_rows)


def test_a_machine_that_was_busy_while_nothing_was_drafted_is_no_reason_to_go_on_drafting() -> None:
    """A drafted token takes as long as one that is sure, and is right in 6 of 10 cases."""
    late = list[int]()
    for seed in range(6):
        world = World(AdaptiveBudget(), 8, line(0, 0.06), drafts_by_chance(0.6, seed)).run_with(8, 0)
        world.seconds = steep
        kept = [sum(lengths) for lengths in world.run_with(8, 2).run_with(8, 7).run(150, 7)]
        assert sum(kept) < 640, "of 8400"
        late.append(sum(kept[-50:]))
    assert sum(late) <= 8 * len(late)


def test_plain_steps_are_seen_while_drafts_pay() -> None:
    lengths = World(AdaptiveBudget(), 2, gentle, lambda row, drafted: drafted).run(24, 5)
    assert all(map(any, lengths[1:4]))
    assert sum(not any(drafted) for drafted in lengths[4:]) == 1


def test_no_control_is_beside_a_prompt() -> None:
    policy = policy_of([0.9], 0.9)
    policy._last_control = -math.inf
    decoding, new = batch_of(10), Row(Request("1", (1,) * 100, 10**6))
    beside = BudgetStep(Batch((*decoding.rows, new)), (4, 0)), BudgetStep(decoding, (4,), num_other_tokens=200)
    assert [any(policy.allot(step)) for step in (*beside, BudgetStep(decoding, (4,)))] == [True, True, False]


def slow_after_prompts(world: World, random: np.random.Generator, prompts: Iterable[int]) -> None:
    """These of its steps have a prompt, and those after them are slow for a while."""

    def seconds(num_tokens: int) -> float:
        since = world.num_steps - max(world.prompts.intersection(range(world.num_steps + 1)))
        return gentle(num_tokens) * float(np.exp(0.03 * random.normal())) + 0.04 * 0.65**since

    world.seconds, world.prompts = seconds, {*prompts}


@pytest.mark.parametrize("seed", range(3))
def test_that_steps_are_slow_for_a_while_after_a_prompt_is_not_put_down_to_their_tokens_or_kv(seed: int) -> None:
    world, cost = World(policy := AdaptiveBudget(), 8, gentle, drafts_by_chance(0.8, seed)), policy._cost
    slow_after_prompts(world, np.random.default_rng(seed), [1, 60, 70, 71, 90])
    for _ in range(10):
        world.run(10, 7)
        assert cost.plain(8, 200) == pytest.approx(gentle(8), rel=0.15)
        assert sum(cost.rises(8, 16)) == pytest.approx(0.016, rel=0.5)


def test_that_steps_are_slow_for_a_while_after_a_prompt_does_not_make_drafts_gain_less() -> None:
    world = World(policy := AdaptiveBudget(), 8, gentle, lambda row, drafted: drafted)
    slow_after_prompts(world, np.random.default_rng(0), range(1, 200, 8))
    world.run(200, 7)
    assert policy._gain == pytest.approx(8 * gentle(8) / gentle(64), rel=0.05)


@pytest.mark.parametrize("confidence", [None, [0.5, 0.4, 0.3, 0.2]])
def test_between_looks_drafts_without_a_confidence_are_as_long_as_what_the_look_kept(
    confidence: list[float] | None,
) -> None:
    policy, step = policy_of([0.9], 0.9, per_token=0.6), BudgetStep(batch_of(10), (4,))
    assert policy.allot(step) == [4]
    kept = policy.trim(step, Draft.from_chains([[1] * 4], confidence and [confidence]))
    assert 0 < kept[0] < 4
    policy._next_look = math.inf
    with_a_new_row = BudgetStep(batch_of(10, 10), (4, 4))
    assert policy.allot(with_a_new_row) == 2 * ([4] if confidence else kept)


def test_it_says_what_drafts_gain() -> None:
    world = World(AdaptiveBudget(), 4, flat, lambda row, drafted: 5)
    world.run(8, 5)
    assert world.policy.summary == ""
    world.run(200, 5)
    expected = r"about [56]\.\d times as fast as without drafts, as budget=adaptive measures it"
    assert re.fullmatch(expected, world.policy.summary)


def test_each_row_has_a_length_of_its_own() -> None:
    world = World(AdaptiveBudget(), 2, line(0.04, 0.01), lambda row, drafted: drafted if row else 0)
    kept = [lengths for lengths in world.warm().run(400, 5)[-300:] if any(lengths)]  # a few compare, without drafts
    assert len(kept) >= 290
    assert all(good >= 4 for _, good in kept)
    assert sum(bad for bad, _ in kept) < 0.35 * len(kept), "it is tried again now and then"


@pytest.mark.parametrize(("accepts", "seconds"), [(0, steep), (5, gentle)])
def test_the_other_choice_is_tried_for_half_a_percent_of_the_time(accepts: int, seconds: Curve) -> None:
    world = World(AdaptiveBudget(), 8, seconds, lambda row, drafted: min(drafted, accepts)).warm()
    pays, num_tries, lost = accepts > 0, 0, 0.0
    world.run(40, 5)
    world.time = 0.0
    for lengths in world.run(1000, 5):
        if pays != any(lengths):
            num_tries += 1
            lost += seconds(8) - seconds(48) / 6 if pays else seconds(8 + sum(lengths)) - seconds(8)
    assert num_tries > 2
    assert lost < 0.006 * world.time


def looking(world: World) -> World:
    """A world in which a look takes 2 ms."""
    policy = world.policy
    assert isinstance(policy, AdaptiveBudget)
    policy._records[0].cost = DrafterRecord().cost  # it was shown drafts that took no time
    world.choosing = lambda: 0.002 if policy._is_look else 0.0
    return world


@pytest.mark.parametrize(
    ("accepts", "seconds", "least", "share"), [(0, steep, 0.0002, 0.001), (5, gentle, 0.0016, 0.0055)]
)
def test_looks_take_a_small_share_of_the_time(accepts: int, seconds: Curve, least: float, share: float) -> None:
    world = looking(World(policy := AdaptiveBudget(), 8, seconds, lambda row, drafted: min(drafted, accepts)).warm())
    world.run(60, 5)
    world.time = 0.0
    with patch.object(record := policy._records[0], "enter", wraps=record.enter) as looks:
        lengths = world.run(600, 5)
    assert sum(map(any, lengths)) > 500 if accepts else sum(map(any, lengths)) < 20
    assert least < 0.002 * looks.call_count / world.time < share


def test_a_look_that_was_held_up_does_not_put_off_the_next_one() -> None:
    world = looking(World(policy := AdaptiveBudget(), 8, gentle, lambda row, drafted: drafted).warm())
    world.run(60, 5)
    policy._next_look = 0.0
    world.choosing = lambda: 1.0
    world.run(1, 5)
    assert 0.3 < policy._next_look - policy._clock < 1.0, "200 times as long as a look that is not"


@pytest.mark.parametrize(("num_drafts", "accepts", "least", "most"), [(0, 0, 31, 33), (0, 2, 1, 3), (100, 0, 50, 300)])
def test_a_drafter_is_not_given_up_after_its_first_drafts(num_drafts: int, accepts: int, least: int, most: int) -> None:
    world = World(policy := AdaptiveBudget(), 8, steep, lambda row, drafted: 0).warm()
    world.run(100, 5)
    record = policy._records[0]
    policy._next_look, record.next_try, record.num_drafts, policy.pause = 0.0, 0.0, num_drafts, 0
    world.accepts = lambda row, drafted: min(drafted, accepts)
    assert any(world.run(1, 5)[0]), "it is tried"
    assert least < (record.next_try - policy._clock) / policy._plain < most


@pytest.mark.parametrize("next_look", [0.0, math.inf])
def test_drafts_in_vain_are_looked_at_in_the_next_step(next_look: float) -> None:
    world = looking(World(policy := AdaptiveBudget(), 8, gentle, lambda row, drafted: drafted).warm())
    world.run(60, 5)
    policy._next_look = next_look
    world.accepts = lambda row, drafted: 0
    world.run(1, 5)
    assert policy._next_look <= policy._clock
    world.accepts = lambda row, drafted: drafted
    world.run(1, 5)
    assert policy._next_look > policy._clock + 0.1


def test_between_looks_each_row_drafts_as_before_and_a_new_one_as_the_others() -> None:
    policy = policy_of([0.9, 0.2], 0.5, per_level=0.08, per_token=0.12)
    good, bad = policy.allot(first := BudgetStep(batch_of(10, 10), (8, 8)))
    assert good > bad > 0
    policy.trim(first, Draft.from_chains([[1] * good, [1] * bad], [[0.9] * good, [0.9] * bad]))
    policy._next_look = math.inf
    step = BudgetStep(batch_of(12, 12, 40), (8, 8, 8))
    assert policy.allot(step) == [good, bad, -(-(good + bad) // 2)]
    assert policy.allot(step._replace(limits=(1, 8, 0))) == [1, bad, 0]
    surely, hardly, unknown = [0.99] * 4, [0.01] * 4, [0.01]
    draft = Draft.from_chains([[1] * 4, [1] * 4, [1]], [surely, hardly, unknown])
    assert policy.trim(step, draft) == [4, 4, 1], "trims save nothing"
    policy._saved = 1.0
    assert policy.trim(step, draft) == [4, 0, 0], "what is found is held to its worth in each step"


@pytest.mark.parametrize(("accepts", "saves"), [(0, True), (5, False)])
def test_between_looks_drafts_are_trimmed_if_that_saves_more_than_it_takes(accepts: int, saves: bool) -> None:
    world = World(policy := AdaptiveBudget(), 8, line(0.05, 0.002), lambda row, drafted: min(drafted, accepts))
    looking(world).run(100, 5)
    assert (policy._saved > 0.0) is saves


def test_the_last_steps_of_rows_say_nothing_of_what_pays() -> None:
    world = looking(World(policy := AdaptiveBudget(), 4, gentle, lambda row, drafted: drafted).warm())
    for _ in range(10):
        assert sum(map(any, world.run(20, 5))) > 15
        policy._next_look = 0.0
        world.run(1, 0)  # one token is left of each
        assert policy._pays


def test_a_try_that_brings_tokens_is_followed_by_another_one() -> None:
    world = World(policy := AdaptiveBudget(), 8, steep, lambda row, drafted: 0).warm()
    world.run(200, 5)
    record, waits = policy._records[0], []
    for accepted in (0, 2):
        world.accepts = lambda row, drafted, accepted=accepted: min(drafted, accepted)
        while not any(world.run(1, 5)[0]):
            pass
        waits.append(record.next_try - policy._clock)
    assert waits[1] < 0.2 < 4 < waits[0]


def test_the_gain_fades_while_it_rests() -> None:
    world = looking(World(policy := AdaptiveBudget(), 8, steep, drafts_by_chance(0.0)).warm())
    world.run(100, 5)
    policy._seconds, policy._gain = (2.0, 1.0), 2.0
    world.run(60, 5)
    assert policy._gain < 1.4, "a draft has to be worth more than what the run makes now"


SHAPE = (-1, 0, 1, -1, 2, 0, 3, 1, -1, 5)  # the first three are a chain
CONFIDENCES = [None, lambda rank: 0.9 if rank == 0 else 0.3, lambda rank: 0.0, lambda rank: 1.0]
"""No confidence, a plausible one, and such as mean nothing."""


@looped("confidence", CONFIDENCES)
def test_hopeless_trees_cost_next_to_nothing(confidence: Callable[[int], float] | None) -> None:
    world = TreeWorld(AdaptiveBudget(), SHAPE, steep, (0.02,), confidence).warm()
    world.run(100, 10)
    assert world.gain(300) > 0.985


@looped("confidence", CONFIDENCES[:2])
def test_good_trees_are_faster_than_their_chain_and_than_nothing(confidence: Callable[[int], float] | None) -> None:
    def gain(shape: Seq[int]) -> float:
        world = TreeWorld(AdaptiveBudget(), shape, gentle, (0.5, 0.4), confidence).warm()
        world.run(60, len(shape))
        return world.gain(200)

    chain, tree = gain((-1, 0, 1, 2)), gain(SHAPE)
    assert tree > 1.05 * chain > 1.05 * 1.4


@pytest.mark.parametrize("confidence", CONFIDENCES[:2])
def test_the_chain_is_taken_of_a_tree_whose_siblings_are_never_right(
    confidence: Callable[[int], float] | None,
) -> None:
    shape = (-1, 0, 1, 2, -1, -1, -1, 0, 0, 0)
    world = TreeWorld(AdaptiveBudget(), shape, line(0.05, 0.004), (0.95, 0.0, 0.0, 0.0), confidence).warm()
    world.run(200, 10)
    kept = [length for lengths in world.run(60, 10) for length in lengths if any(lengths)]
    assert len(kept) >= 4 * 56
    assert sum(length == 4 for length in kept) > 0.85 * len(kept)


@looped("confidence", CONFIDENCES[::2])
def test_trees_that_become_good_are_found_out(confidence: Callable[[int], float] | None) -> None:
    world = TreeWorld(AdaptiveBudget(), SHAPE, line(0.05, 0.005), (), confidence).warm()
    assert sum(map(sum, world.run(150, 10)[-50:])) < 50
    world.chances = (0.9, 0.08)
    kept = [lengths for lengths in world.run(500, 10)[-50:] if any(lengths)]
    assert len(kept) >= 47
    assert sum(map(sum, kept)) >= 11.5 * len(kept), "three nodes of each row are best"


def kneed(num_tokens: int) -> float:
    """Milliseconds of a step on two cores: further tokens are nearly free up to the 8th."""
    return 10.0 + 0.2 * min(num_tokens, 8) + 0.8 * max(0, num_tokens - 8)


def relative_rate(chance: float, wander: float, seed: int, num_rows: int) -> float:
    """Tokens a second under the policy ÷ those without drafts, as if the machine had never wandered.

    The logarithm of its slowness strays by `wander` over some hundred steps; each step is up to 30 % longer by chance.
    """
    random, pace, steady = np.random.default_rng(seed), 0.0, 0.0
    world = World(AdaptiveBudget(), num_rows, kneed, drafts_by_chance(chance, seed))

    def seconds(num_tokens: int) -> float:
        nonlocal pace, steady
        pace = 0.99 * pace + wander * math.sqrt(0.02) * random.normal()
        steady += kneed(num_tokens)
        return kneed(num_tokens) * math.exp(pace + min(0.1 * abs(random.normal()), 0.3))

    world.seconds = seconds
    world.warm()
    before, steady = sum(len(row.tokens) for row in world.rows), 0.0
    world.run(800, 4)
    num_tokens = sum(len(row.tokens) for row in world.rows) - before
    return num_tokens / steady / (num_rows / kneed(num_rows))


@pytest.mark.parametrize("wander", [0.0, 0.15])
@looped("seed", range(3))
@pytest.mark.parametrize(("chance", "num_rows", "least"), [(0.5, 8, 0.98), (0.6, 4, 0.9)])
def test_a_machine_that_wanders_makes_no_drafts_that_do_not_pay_and_ends_none(
    chance: float, num_rows: int, least: float, wander: float, seed: int
) -> None:
    rates = [sum(chance**i for i in range(n + 1)) * kneed(num_rows) / kneed(num_rows * (n + 1)) for n in range(5)]
    assert (num_rows == 4) == (max(rates) > 1.4)
    assert relative_rate(chance, wander, seed, num_rows) > least * max(rates)
