"""Trees of a draft model are those that each paper describes. Oracle: the draft model without a cache. float64."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch
from emssd_draft_model.sequoia import SequoiaShape

from emssd.attention.trees import depths
from emssd.draft_models import StaticShape
from emssd.draft_models.shapes import DynamicShape
from emssd.drafting import Draft
from emssd.model import TargetModel
from emssd.sampling import SamplingParams
from emssd.sequences import Request, Row
from tests.support.draft_trees import (
    Node,
    children,
    draft_model,
    make_drafter,
    nodes,
    probabilities,
    propose,
    same,
)
from tests.support.tiers import looped
from tests.support.trees import eagle2_tree, sequence

PROMPTS = [[3, 4, 5, 6, 7, 3, 4, 5], [8], [9, 10, 9]]


def static_tree(model: TargetModel, prompt: Seq[int], expansion: Seq[int], count: int) -> list[Node]:
    level, shares = [((), 1.0)], dict[tuple[int, ...], float]()
    for width in expansion:
        level = [child for way, _ in level for child in children(model, prompt, way, width)]
        shares.update(level)
    scores = {way: math.prod(shares[way[:length]] for length in range(1, len(way) + 1)) for way in shares}
    return [(way, shares[way]) for way in sorted(scores, key=lambda way: -scores[way])[:count]]


@looped("architecture", ["opt", "llama", "mistral"])
@looped("budget", [[14, 14, 14], [3, 0, 7], [1, 5, 14]])
def test_static_gives_every_node_of_a_level_the_same_number_of_children(architecture: str, budget: list[int]) -> None:
    model = draft_model(architecture)
    draft = propose(make_drafter(StaticShape([2, 3, 1]), model), list(map(sequence, PROMPTS, "abc")), budget)
    assert draft.lengths == budget  # 2 + 6 + 6 nodes
    for row, (prompt, count) in enumerate(zip(PROMPTS, budget, strict=True)):
        assert same(nodes(draft, row), static_tree(model, prompt, [2, 3, 1], count))


@looped("architecture", ["opt", "llama", "mistral"])
@looped(("depth", "top_k"), [(1, 3), (3, 2), (4, 3), (5, 1)])
@looped("budget", [[9, 9, 9], [2, 0, 5], [1, 30, 7]])
def test_dynamic_is_the_tree_of_eagle_2(architecture: str, depth: int, top_k: int, budget: list[int]) -> None:
    model = draft_model(architecture)
    shape = DynamicShape(30, depth, top_k)
    draft = propose(make_drafter(shape, model), list(map(sequence, PROMPTS, "abc")), budget)
    for row, (prompt, count) in enumerate(zip(PROMPTS, budget, strict=True)):

        def likeliest(way: tuple[int, ...], width: int, prompt: list[int] = prompt) -> list[tuple[int, float]]:
            return [(child[-1], math.log(share)) for child, share in children(model, prompt, way, width)]

        assert same(nodes(draft, row), [*eagle2_tree(likeliest, count, depth, top_k).items()])


def test_sequoia_drafts_the_tree_that_is_best_for_its_table() -> None:
    shape = SequoiaShape(5, 3, 3, [[0.5, 0.3, 0.1], [0.9, 0.05], [0.2]])
    prompt = [3, 4, 5]
    draft = propose(make_drafter(shape), [sequence(prompt)], [5])
    first = [way for way, _ in children(draft_model(), prompt, (), 3)]
    below = [children(draft_model(), prompt, way, 1)[0][0] for way in first[:2]]
    # Worth: 0.5, 0.3, 0.45 and 0.27 below these, and 0.1; the third child is worth more than the third level's 0.09.
    assert {way for way, _ in nodes(draft, 0)} == {*first, *below}


def test_sequoia_leaves_out_ranks_of_tokens_that_sampling_does_not_leave() -> None:
    """Its table has the second child first, and there is only one, or two."""
    shape = SequoiaShape(5, 1, 3, [[0.1, 0.5, 0.3]])
    for top_k in (1, 2):
        only = SamplingParams(temperature=1.0, top_k=top_k)
        row = Row(Request("a", (3, 4, 5), 40, sampling=only))
        assert propose(make_drafter(shape), [row], [5]).lengths == [top_k]


def test_a_temperature_sharpens_the_probabilities_and_so_deepens_the_tree() -> None:
    def draft(temperature: float, num_nodes: int = 6) -> Draft:
        return propose(make_drafter(DynamicShape(num_nodes, 6, 3, temperature)), [sequence(PROMPTS[0])], [num_nodes])

    for temperature in (1.0, 0.5):
        root = sorted(
            (torch.tensor(probabilities(draft_model(), tuple(PROMPTS[0]))).log() / temperature).softmax(-1).tolist()
        )
        confidence = draft(temperature).confidence
        assert confidence is not None
        assert math.isclose(confidence[0], root[-1], rel_tol=1e-6)
    assert max(depths(draft(0.05).tree(0))) > max(depths(draft(1.0).tree(0)))
