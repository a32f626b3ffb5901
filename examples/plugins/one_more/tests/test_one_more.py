"""The policy keeps every rule of its interface, allots what it should, and decoding with it accepts drafts."""

from __future__ import annotations

import pytest
from emssd import Engine
from emssd.drafting import BudgetPolicy, BudgetStep
from emssd.errors import ConfigError
from emssd.sequences import Batch, Request, Row
from emssd_testing import BudgetPolicyConformance, tiny_model

from emssd_one_more import OneMoreConfig
from emssd_one_more.policy import OneMoreBudget


class TestOneMore(BudgetPolicyConformance):
    config = OneMoreConfig

    def make_policy(self) -> BudgetPolicy:
        return OneMoreBudget(OneMoreConfig())


def test_a_new_row_drafts_the_first_length_within_its_limit() -> None:
    batch = Batch((Row(Request("a", (5, 6), 20)), Row(Request("b", (7,), 20))))
    assert OneMoreBudget(OneMoreConfig(first=3)).allot(BudgetStep(batch, (9, 1))) == [3, 1]


def test_drafts_are_accepted_and_the_text_is_that_of_no_drafts() -> None:
    def engine(drafter: str) -> Engine:
        policy = OneMoreBudget(OneMoreConfig())
        return Engine.from_model(tiny_model(std=0.12), drafter=drafter, budget=policy, batch_size=2)

    plain, drafting = engine("none"), engine("suffix")
    prompts = [[5, 6, 7], [9]]
    expected = [row.token_ids for row in plain.generate(prompts, 30, ignore_eos=True)]
    assert [row.token_ids for row in drafting.generate(prompts, 30, ignore_eos=True)] == expected
    assert drafting.report.num_accepted > 0


def test_a_first_length_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"budget\.first is -1"):
        OneMoreBudget(OneMoreConfig(first=-1))
