"""A budget policy ends drafts between the passes of what drafts: fewer levels, and no other token.

Oracles: plain decoding and sampling by hand, without a cache. float64.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from emssd.decoding.engine import Engine
from emssd.draft_models import LevelDrafter
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, DraftedNode
from emssd.drafting.budget import FixedBudget
from emssd.errors import PluginError
from emssd.sampling import SamplingParams
from tests.support.budget_world import EndsByTurns
from tests.support.draft_models import DRAFT_MODEL_OPTIONS, draft_model_drafter
from tests.support.right_drafters import decode, target, trial
from tests.support.right_drafts import PROMPTS

SAMPLED: list[SamplingParams | None] = [
    None,
    SamplingParams(temperature=3.0, seed=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=2.0, top_p=0.9, frequency_penalty=0.4, seed=2),
]


def with_draft_model(tree: str, policy: BudgetPolicy) -> Engine:
    """An engine whose draft model is the target itself, so that chains are right to their ends."""
    drafter = draft_model_drafter(target(), tree, target().vocab_size)
    return Engine.assemble(target(), None, drafter=drafter, backend="ragged", budget=policy, eos=())


@pytest.mark.parametrize("tree", DRAFT_MODEL_OPTIONS)
def test_of_a_draft_model(tree: str) -> None:
    policy = EndsByTurns()
    decode(with_draft_model(tree, policy), SAMPLED)
    policy.check()


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
@pytest.mark.parametrize("head", ["eagle", "eagle3", "mtp", "hydra"])
def test_of_a_head(head: str, tree: str) -> None:
    policy = EndsByTurns()
    engine = trial(head).make_engine({"tree": tree})
    engine.drafting.policy = policy
    decode(engine, SAMPLED)
    policy.check()


def test_chains_that_are_ended_are_right_to_their_ends_and_tell_their_confidence() -> None:
    class Sure(EndsByTurns):
        def trim(self, step: BudgetStep, draft: Draft) -> Seq[int]:
            assert draft.confidence is not None or not any(draft.lengths)
            return super().trim(step, draft)

    engine = with_draft_model("chain", Sure())
    decode(engine)
    assert engine.report.num_accepted == engine.report.num_drafted > 20


def entropy_budget(**options: Any) -> BudgetPolicy:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "entropy_budget.py"))
    made: BudgetPolicy = example["EntropyBudget"](**options)
    return made


@pytest.mark.parametrize("kinds", [[None] * 4, SAMPLED], ids=["greedy", "sampled"])
def test_by_entropy_as_adaedl_does(kinds: list[SamplingParams | None]) -> None:
    """The less it dares, the fewer tokens are drafted."""
    decode(with_draft_model("chain", watched := EndsByTurns()), kinds)
    reports, entropies = [], sorted(node.entropy for node in watched.told)
    for least in (-9.0, 1 - math.sqrt(0.2 * entropies[len(entropies) // 2]), 1.0):
        engine = with_draft_model("chain", entropy_budget(least=least))
        decode(engine, kinds)
        reports.append(engine.report)
    drafted = [report.num_drafted / report.num_steps for report in reports]
    assert drafted[0] > drafted[1] > drafted[2] > 0


@pytest.mark.parametrize("tree", ["rsd_c", "rsd_s"])
def test_with_residual_sampling_it_is_told_of_distributions_alone(tree: str) -> None:
    """Whichever tokens were drawn, all is told alike of siblings."""

    class Watches(EndsByTurns):
        def goes_on(self, step: BudgetStep, newest: Seq[Seq[DraftedNode]]) -> list[bool]:
            if self._level == 0:
                assert all(len({*nodes}) < 2 and all(node.chance == 1 for node in nodes) for nodes in newest)
            return super().goes_on(step, newest)

    policy = Watches()
    engine = with_draft_model(tree, policy)
    done = engine.generate(PROMPTS, 31, sampling=SamplingParams(temperature=1.0, method="residual", seed=3))
    assert [len(row.token_ids) for row in done] == [31] * 4
    policy.check()


@patch.object(LevelDrafter, "run_chain", autospec=True, side_effect=LevelDrafter.run_chain)
def test_a_policy_that_does_not_mind_is_not_asked(run_chain: Mock) -> None:
    """So a drafter may draft a chain in one call, as before; and again after another policy had ended drafts."""
    for engine in (with_draft_model("chain", EndsByTurns()), trial("eagle3").make_engine({"tree": "chain"})):
        engine.drafting.policy = FixedBudget()
        drafter: Any = engine.drafting.drafters[0].drafter
        decode(engine)
        assert run_chain.called
        assert drafter._goes_on is None
        run_chain.reset_mock()


class Wrong(BudgetPolicy):
    def allot(self, step: BudgetStep) -> Seq[int]:
        return step.limits

    def goes_on(self, step: BudgetStep, newest: Seq[Seq[DraftedNode]]) -> Seq[bool]:
        return [True]


class Raises(Wrong):
    def goes_on(self, step: BudgetStep, newest: Seq[Seq[DraftedNode]]) -> Seq[bool]:
        raise SystemExit(0)


@pytest.mark.parametrize(
    ("policy", "refusal"),
    [
        (Wrong(), r"budget policy Wrong broke its interface: goes_on gave \[1\], and the limits"),
        (Raises(), r"budget policy Raises failed in goes_on: SystemExit: 0"),
    ],
)
def test_a_policy_that_fails_ends_the_run_and_not_its_drafter(policy: BudgetPolicy, refusal: str) -> None:
    engine = with_draft_model("chain", policy)
    with pytest.raises(PluginError, match=refusal):
        decode(engine)
    assert engine.drafting.drafters[0].failure is None
