"""`Group`: two ranks, here two threads, each with an engine of its own on a whole model."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emssd_testing import tiny_model

from emssd.attention import PackedInputs
from emssd.attention.packed import Drafted
from emssd.decoding import caches
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Drafter, Outcome, StepStats
from emssd.errors import ConfigError, GroupError
from emssd.model import TargetModel
from emssd.model.run.parallel import Group
from emssd.sequences import Batch
from tests.support.tiers import looped

PROMPTS = [[1, 5, 6, 5, 6, 5], [1, 7, 7, 8], [4]]


def in_ranks(*work: Callable[[Group], Any]) -> list[Any]:
    """Run `work` in ranks of one group. Returns the result or the exception of each."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        try:
            return work[rank](Group(dist.ProcessGroupGloo(store, rank, len(work), timedelta(seconds=20))))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(run, range(len(work))))


class LastToken(Drafter):
    """Drafts a row's last token again, or the one `other` places after it."""

    num_speculative_tokens = 4

    def __init__(self, other: int = 0) -> None:
        self._other = other

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.from_chains(
            [[(row.tokens[-1] + self._other) % 11] * limit for row, limit in zip(batch, budget, strict=True)]
        )


class ByClock(BudgetPolicy):
    """Allots by the last digits of what the latest step took."""

    def __init__(self) -> None:
        self.seen = list[StepStats]()

    def allot(self, step: BudgetStep) -> Seq[int]:
        most = int(1e9 * sum(self.seen[-1].seconds.values())) % 5 if self.seen else 4
        return [min(limit, most) for limit in step.limits]

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        self.seen.append(stats)


def decodes(drafter: Drafter, policy: BudgetPolicy) -> Callable[[Group], list[list[int]]]:
    """Decodes `PROMPTS` with a model of its own."""
    model, options = tiny_model("llama", vocab_size=11), EngineOptions(batch_size=2, kv_memory="0.9")

    def decode(group: Group) -> list[list[int]]:
        target = TargetModel(model, group=group, frozen=True)
        engine = Engine.assemble(target, None, drafter=drafter, backend="ragged", budget=policy, options=options)
        return [[*row.token_ids] for row in engine.generate(PROMPTS, max_new_tokens=12, ignore_eos=True)]

    return decode


def test_clocks_of_rank_0_and_the_least_room_hold_for_all_and_the_tokens_are_those_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policies, free = (ByClock(), ByClock()), iter([10**7, 10**7, 29_000])  # the last is two pages and a spare one
    monkeypatch.setattr(caches, "free_for", lambda spec: next(free))
    alone = decodes(LastToken(), ByClock())(Group())
    assert in_ranks(*(decodes(LastToken(), policy) for policy in policies)) == [alone, alone]
    first, second = ([(step.seconds, step.stages, step.drafted) for step in policy.seen] for policy in policies)
    assert first == second
    assert policies[0].seen[0].num_waiting == 2, "the first row takes both pages"


def test_ranks_that_draft_differently_end_before_a_token_comes_of_it() -> None:
    for error in in_ranks(*(decodes(LastToken(i), ByClock()) for i in range(2))):
        assert isinstance(error, GroupError)
        assert "do not do the same" in str(error)
        assert error.finished == []


STEP = PackedInputs(
    ("a", "b"), torch.tensor([3, 4, 0]), torch.tensor([0, 1, 7]), (0, 2, 3), (2, 8), torch.tensor([1, 2])
)


@looped(
    "other",
    [
        {"request_ids": ("a", "c")},
        {"input_ids": torch.tensor([3, 5, 0])},
        {"position_ids": torch.tensor([0, 1, 6])},
        {"qo_indptr": (0, 1, 3)},
        {"kv_lens": (2, 9)},
        {"logit_rows": torch.tensor([1])},
        {"trees": ((), (-1, -1))},
        {"drafted": Drafted(torch.tensor([2]), torch.tensor([9]))},
    ],
)
def test_no_step_begins_that_is_another_in_some_rank(other: dict[str, Any]) -> None:
    def run(packed: PackedInputs) -> Callable[[Group], str]:
        def step(group: Group) -> str:
            with group.step(packed):
                return "begun"

        return step

    assert in_ranks(run(STEP), run(STEP._replace())) == ["begun", "begun"]
    assert [type(error) for error in in_ranks(run(STEP), run(STEP._replace(**other)))] == [GroupError] * 2


def test_a_rank_that_ends_and_one_that_fails_leave_no_other_waiting() -> None:
    def fail(group: Group) -> None:
        with pytest.raises(ZeroDivisionError), group.step(STEP):
            _ = 1 / 0
        group.first([1.0])

    ended, error = in_ranks(Group.close, lambda group: group.first([1.0]))
    assert ended is None
    assert "another process of this tensor parallel run has ended" in str(error)
    (failed,) = (error for error in in_ranks(fail, lambda group: group.step(STEP).__enter__()) if error)
    assert "the run must be started again" in str(failed)


def test_ranks_share_the_least_room_and_numbers_of_rank_0() -> None:
    def numbers(group: Group) -> tuple[int, list[float]]:
        return group.least(9 - group.rank), group.first([group.rank + 0.5, 7])

    assert in_ranks(numbers, numbers) == [(8, [0.5, 7]), (8, [0.5, 7])]
    assert numbers(Group()) == (9, [0.5, 7])


def test_alone_what_rank_0_makes_or_raises_is_that() -> None:
    assert Group().made_by_first(lambda: 3) == 3
    with pytest.raises(ConfigError, match="no such prompts"):
        Group().made_by_first(lambda: (_ for _ in ()).throw(ConfigError("no such prompts")))
