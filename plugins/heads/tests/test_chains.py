"""Chains whose tokens stay on the device from pass to pass are the same as chains that are drafted level by level.

Oracle: the same drafter, level by level.
"""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest
from emssd_testing.drafters import ScriptedBudget
from emssd_testing.models import tiny_model

from emssd.draft_models import DynamicShape, LevelDrafter
from emssd.drafting import Draft
from emssd.model import TargetModel
from tests.support.draft_models import draft_model_drafter
from tests.support.random_drafters import random_head
from tests.support.right_drafters import trial
from tests.support.right_drafts import KINDS

Drafts = list[tuple[tuple[int, ...], list[int], tuple[float, ...] | None]]
SHAPES: dict[str, Any] = {"draft_model": "chain", "unsure": DynamicShape(6, 6, 1, 2.0, 0.12)}


UNEVEN = [(length, 6) for length in (1, 6, 0, 4, 2, 5, 3)]  # other lengths in each step and row


def decoded(name: str, kinds: str) -> tuple[Drafts, list[int]]:
    """The drafts of an engine, and how many tokens each pass of its drafter computed."""
    case, drafts = trial("eagle3"), Drafts()
    if name != "eagle3":
        model = TargetModel(tiny_model("llama", seed=1, vocab_size=case.target.vocab_size))
        case.load = lambda *_: draft_model_drafter(model, SHAPES[name], case.target.vocab_size)
    case.make_engine({"tree": "chain", "depth": 6, "path": random_head("eagle3")}, batch_size=3)
    case.engine.drafting.policy, drafter = ScriptedBudget(UNEVEN), case.engine.drafting.drafters[0].drafter
    backend = drafter._runner.backend if name != "eagle3" else drafter._runner._backend
    if name == "eagle3":
        drafter.shape.temperature, drafter.shape.least = 1.5, math.log(0.3)
    propose, backend.plan = drafter.propose, Mock(wraps=backend.plan)

    def proposed(*arguments: Any) -> Draft:
        draft: Draft = propose(*arguments)
        drafts.append((draft.indptr, draft.token_ids.tolist(), draft.confidence))
        return draft

    drafter.propose = proposed
    case.decode(KINDS[kinds])
    return drafts, [call.args[0].num_tokens for call in backend.plan.call_args_list]


@pytest.mark.parametrize("kinds", ["greedy", "sampled"])
@pytest.mark.parametrize("name", [*SHAPES, "eagle3"])
def test_a_chain_is_what_is_drafted_level_by_level(name: str, kinds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of uneven lengths, beside rows that begin and end, and where tokens that are not sure end their chains."""
    drafted = decoded(name, kinds)
    monkeypatch.setattr(LevelDrafter, "_runs_chain", lambda *_: False)
    assert decoded(name, kinds) == drafted
    assert max(indptr[-1] for indptr, *_ in drafted[0]) > 6
    assert name == "draft_model" or sum(min(sure) < 0.3 for _, _, sure in drafted[0] if sure) > 3
