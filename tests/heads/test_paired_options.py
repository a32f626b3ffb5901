"""Options of drafters with heads: refusals, and the authors' tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emssd.drafters.heads.options import TreeKind, TreeOptions, shape_of
from emssd.errors import ConfigError
from tests.support.right_drafters import trial
from tests.support.tiers import looped


@looped(
    ("options", "words"),
    [
        ({"path": None}, "give drafter.path=FOLDER"),
        ({"tree": "statics"}, "drafter.tree is 'statics'; did you mean 'static'? choose one of chain, static, dynamic"),
        ({"depth": 0}, "drafter.depth is 0; it must be at least 1"),
        ({"depth": 0, "tree": "chain"}, "drafter.depth is 0; it must be at least 1"),
        ({"num_nodes": 0, "tree": "dynamic"}, "drafter.num_nodes is 0"),
        ({"path": "./nowhere"}, "there is no such folder"),
        (
            {"tree": "static", "static_tree": "mc_sim_7b"},
            "drafter.static_tree is 'mc_sim_7b'; did you mean 'mc_sim_7b_63'",
        ),
        ({"tree": "static", "static_tree": "no.json"}, "drafter.static_tree=no.json is no tree ([Errno 2]"),
    ],
)
@looped("head", ["eagle", "eagle3", "mtp"])
def test_options_that_cannot_work_are_refused(head: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        trial(head).make_engine(options)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ("[]", "it needs a node at least"),
        ("[[0], [-1]]", "numbers from 0 on"),
        ("[[0.5]]", "numbers from 0 on"),
        ('["a"]', "numbers from 0 on"),
        ("[[0, 0], [0]]", "path [0, 0] comes twice, or before its parent"),
        ("[0, 1]", "not iterable"),
        ("7", "not iterable"),
        ("[[0]", "Expecting"),
    ],
)
def test_files_that_are_no_trees_are_refused(held: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(held)
    with pytest.raises(ConfigError) as raised:
        shape_of(TreeOptions(tree=TreeKind.static, static_tree=str(file)), "emssd.drafters.heads", top_k=4)
    assert words in str(raised.value)


def test_the_authors_tree_comes_along() -> None:
    shape = shape_of(TreeOptions(tree=TreeKind.static), "emssd.drafters.heads", top_k=4)
    assert (shape.num_nodes, shape.depth, shape.width) == (25, 5, 4)
