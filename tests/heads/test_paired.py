"""A head's states of a row come from that row, even if the head drafts seldom or its reach ends.

Oracle: plain decoding by hand, without a cache. float64.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

import pytest

import emssd.drafters.states
from emssd.drafting import BudgetPolicy, BudgetStep
from tests.support.perfect_head import write_perfect_eagle3
from tests.support.right_drafters import DEPTH, trial
from tests.support.right_drafts import NUM_NEW, PROMPTS


def test_later_rows_of_the_same_names_have_nothing_of_earlier_ones() -> None:
    own = trial("eagle3")
    engine = own.make_engine({"tree": "chain"})
    for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[1:]):
        for generation in engine.generate(prompts, NUM_NEW):
            assert generation.token_ids == own.text("", generation.prompt_ids, None)
            assert generation.num_accepted == generation.num_drafted > NUM_NEW // 2


class Seldom(BudgetPolicy):
    """Drafts in every eleventh step, and then for every other row."""

    num_steps = 0

    def allot(self, step: BudgetStep) -> list[int]:
        self.num_steps += 1
        drafts = self.num_steps % 11 == 0
        return [limit if drafts and (row + self.num_steps) % 2 else 0 for row, limit in enumerate(step.limits)]


@pytest.mark.parametrize(("num_arrived", "num_waiting"), [(1024, 256), (9, 4)], ids=str)
def test_rows_that_seldom_draft(num_arrived: int, num_waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Target states wait for the next draft. Rows with too many make features of them earlier."""
    monkeypatch.setattr(emssd.drafters.states, "_MOST_ARRIVED", num_arrived)
    monkeypatch.setattr(emssd.drafters.states, "_MOST_WAITING", num_waiting)
    own = trial("eagle3")
    engine = own.make_engine({"tree": "chain"})
    engine.drafting.policy = Seldom()
    done = own.decode()
    assert all(generation.num_accepted == generation.num_drafted for generation in done)
    assert sum(generation.num_drafted for generation in done) > 2 * DEPTH


def test_a_head_with_a_longest_row_drafts_no_further() -> None:
    longest = {"max_position_embeddings": 20, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    path = write_perfect_eagle3(Path(mkdtemp(prefix="emssd-head-")), **longest)
    own = trial("eagle3")
    own.make_engine({"tree": "dynamic", "num_nodes": 14, "top_k": 3, "path": path})
    long = own.decode()[3]
    assert 0 < long.num_accepted < 12
