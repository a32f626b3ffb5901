"""Options and states of drafters with heads, and heads that keep their weights as bytes.

Oracles: plain decoding by hand, without a cache, float64; the module itself, with rounded weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import emssd_heads.states
import pytest
from emssd_heads.options import TreeKind, TreeOptions, shape_of
from emssd_testing.drafters import ScriptedBudget

from tests.support.heads import refusal
from tests.support.perfect_head import write_perfect_eagle3
from tests.support.right_drafters import DEPTH, trial
from tests.support.right_drafts import NUM_NEW, PROMPTS
from tests.support.tiers import looped


def test_later_rows_of_the_same_names_have_nothing_of_earlier_ones() -> None:
    case = trial("eagle3")
    engine = case.make_engine({"tree": "chain"})
    for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[1:]):
        for generation in engine.generate(prompts, NUM_NEW):
            assert generation.token_ids == case.text("", generation.prompt_ids, None)
            assert generation.num_accepted == generation.num_drafted > NUM_NEW // 2


@pytest.mark.parametrize("num_waiting", [256, 4])
def test_rows_that_seldom_draft(num_waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows draft in each eleventh step. States wait until then; rows with too many make features of them."""
    monkeypatch.setattr(emssd_heads.states, "_MOST_WAITING", num_waiting)
    case = trial("eagle3")
    engine = case.make_engine({"tree": "chain"})
    engine.drafting.policy = ScriptedBudget([(0, 0)] * 40 + [(9, 9), (0, 0)] * 2)
    done = case.decode()
    assert all(generation.num_accepted == generation.num_drafted for generation in done)
    assert sum(generation.num_drafted for generation in done) > 2 * DEPTH


def test_a_head_with_a_longest_row_drafts_no_further(tmp_path: Path) -> None:
    longest = {"max_position_embeddings": 20, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    path = write_perfect_eagle3(tmp_path, **longest)
    case = trial("eagle3")
    case.make_engine({"tree": "dynamic", "num_nodes": 14, "top_k": 3, "path": path})
    long = case.decode()[3]
    assert 0 < long.num_accepted < 12


PAIRED = ("eagle", "eagle3", "mtp")
OF_TREES = (*PAIRED, "hydra", "medusa")


@looped(
    ("heads", "options", "words"),
    [
        ((*OF_TREES, "kangaroo", "dflash"), {"path": None}, "give drafter.path=FOLDER"),
        ((*OF_TREES, "kangaroo", "dflash"), {"path": "./nowhere"}, "there is no such folder"),
        (
            PAIRED,
            {"tree": "static", "static_tree": "mc_sim_7b"},
            "drafter.static_tree is 'mc_sim_7b'; did you mean 'mc_sim_7b_63'",
        ),
        (PAIRED, {"tree": "static", "static_tree": "no.json"}, "drafter.static_tree=no.json is no tree ([Errno 2]"),
        (("medusa",), {"static_tree": "vicuna_7b"}, "static_tree is 'vicuna_7b'; did you mean 'vicuna_7b_stage"),
        (("medusa",), {"static_tree": "none"}, "drafter.static_tree is 'none'; choose one of mc_sim_7b_63, "),
        (("hydra",), {"static_tree": "none"}, "drafter.static_tree is 'none'; choose one of mc_sim_7b_63"),
        (("kangaroo",), {"num_layers": 4}, "drafter.num_layers is 4; choose 1 to 3, as the target has"),
    ],
)
def test_options_that_cannot_work_are_refused(heads: tuple[str, ...], options: dict[str, Any], words: str) -> None:
    for head in heads:
        assert words in refusal(lambda head=head: trial(head).make_engine(options)), head


@looped(
    "held, words",
    [
        ("[]", "it needs a node at least"),
        ("[[0], [-1]]", "numbers from 0 on"),
        ("[[0.5]]", "numbers from 0 on"),
        ('["a"]', "numbers from 0 on"),
        ("[[0, 0], [0]]", "path [0, 0] comes twice, or before its parent"),
        ("[[0], [0]]", "path [0] comes twice, or before its parent"),
        ("[0, 1]", "not iterable"),
        ("7", "not iterable"),
        ("[[0]", "Expecting"),
    ],
)
def test_files_that_are_no_trees_are_refused(held: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(held)
    options = TreeOptions(tree=TreeKind.static, static_tree=str(file))
    assert words in refusal(lambda: shape_of(options, "emssd_heads", top_k=4))


def test_the_authors_tree_comes_along() -> None:
    shape = shape_of(TreeOptions(tree=TreeKind.static), "emssd_heads", top_k=4)
    assert (shape.num_nodes, shape.depth, shape.width) == (25, 5, 4)
