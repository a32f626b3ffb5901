"""The law of the output is the target's with any draft. The outcomes of the rules are summed in fractions."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from random import Random

import pytest
from emssd_residual.distributions import choose, without
from emssd_residual.rules import verify_deterministic, verify_traversal

from tests.support.drawing import SampledTree
from tests.support.exact import Law, Model, Rule, Uniform, continued, emitted, law_of, probabilities, target_law, way
from tests.support.residual_cases import (
    DRAFTS,
    PAPER,
    TARGETS,
    Tree,
    beam_trees,
    mixed,
    rebuilt,
    token_by_token,
    trees_of,
)
from tests.support.tiers import few, looped

RULES: dict[str, Rule] = {"traversal": verify_traversal, "deterministic": verify_deterministic}
PAIRS = [*product(TARGETS, DRAFTS)]
SHAPES = [(1,), (2,), (3,), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (1, 1, 1)]

rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def is_lossless(law: Law, target: Model, depth: int) -> bool:
    return continued(law, target, depth + 1) == target_law(target, depth + 1)


@rules
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_output_of_any_tree_has_the_law_of_the_target(rule: Rule, shape: tuple[int, ...]) -> None:
    for target, draft in PAIRS:
        law = mixed(rule, trees_of(draft, shape), TARGETS[target], DRAFTS[draft])
        assert is_lossless(law, TARGETS[target], len(shape)), (target, draft)


@looped("name", TARGETS)
@looped("shape", [(1, 1), (2, 2), (3, 1)])
def test_a_draft_with_the_law_of_the_target_is_accepted_to_its_end(name: str, shape: tuple[int, ...]) -> None:
    target = TARGETS[name]
    law = mixed(verify_traversal, trees_of(target, shape), target, target)
    assert {len(text) for text in law} == {len(shape) + 1}
    assert is_lossless(law, target, len(shape))


def num_accepted(law: Law) -> Fraction:
    return sum((chance * (len(text) - 1) for text, chance in law.items()), Fraction(0))


@pytest.mark.parametrize(("rule", "expected"), [(token_by_token, Fraction(10, 9)), (verify_traversal, Fraction(11, 9))])
def test_the_example_of_block_verification_accepts_as_much_as_its_paper_says(rule: Rule, expected: Fraction) -> None:
    target, draft = PAPER
    assert num_accepted(mixed(rule, trees_of(draft, (1, 1)), target, draft)) == expected


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 1), (1, 1, 1)], ids=str)
def test_traversal_never_accepts_less_than_token_by_token(shape: tuple[int, ...]) -> None:
    gains = []
    for target, draft in PAIRS:
        traversal, single = (
            num_accepted(mixed(rule, trees_of(draft, shape), TARGETS[target], DRAFTS[draft]))
            for rule in (verify_traversal, token_by_token)
        )
        gains.append(traversal - single)
    assert min(gains) >= 0
    assert max(gains) > 0


def test_a_one_hot_draft_is_accepted_as_often_without_its_distribution() -> None:
    for target in TARGETS.values():
        laws = [mixed(rule, trees_of("one-hot", (1, 1)), target, DRAFTS["one-hot"]) for rule in RULES.values()]
        one, other = (num_accepted(law) for law in laws)
        assert one == other


def grown(seed: int, draft: Model, num_nodes: int, depth: int) -> Callable[[Callable[[], Uniform]], Tree]:
    """Draws node by node. Where the next goes, or that none does, is decided by all that was drawn before."""

    def grow(uniform: Callable[[], Uniform]) -> Tree:
        tree = SampledTree()
        drawable = {-1: draft(())}
        for _ in range(num_nodes):
            open_nodes = [node for node, q in drawable.items() if q.sum() > 0 and len(way(tree, node)) < depth]
            at = Random(f"{seed} {tree.token_ids} {tree.parents}").choice([*open_nodes, None])
            if at is None:
                break
            token = choose(drawable[at], uniform())
            drawable[at] = without(drawable[at], token)
            node = tree.add(at, token, draft(way(tree, at)))
            drawable[node] = draft(way(tree, node))
        return tuple(tree.token_ids), tuple(tree.parents)

    return grow


@rules
def test_growth_may_depend_on_everything_that_was_drawn_before(rule: Rule) -> None:
    shapes = set()
    for seed in range(25):
        target, draft = PAIRS[seed % len(PAIRS)]
        trees = law_of(grown(seed, DRAFTS[draft], 4, 2))
        shapes |= {parents for _, parents in trees}
        assert is_lossless(mixed(rule, trees, TARGETS[target], DRAFTS[draft]), TARGETS[target], 2), seed
    assert len(shapes) > 10


@rules
@pytest.mark.parametrize("width", [1, 2, 3])
def test_stochastic_beams_are_drafts_like_others_and_so_are_their_first_nodes(rule: Rule, width: int) -> None:
    depth, pairs = 2, [("with zeros", "all possible"), ("all possible", "one-hot"), ("all possible", "all possible")]
    for target, draft in pairs[: 4 - width]:
        trees = beam_trees(DRAFTS[draft], width, depth)
        for length in range(1, width * depth + 1):
            law = mixed(rule, trees, TARGETS[target], DRAFTS[draft], lambda tree, n=length: range(len(tree[0]))[:n])
            assert is_lossless(law, TARGETS[target], depth), (target, draft, length)


def with_replacement(draft: Model, num_children: int) -> dict[Tree, Fraction]:
    """Trees of depth 2: children of the origin that may be equal, each with one child."""

    def draw(uniform: Callable[[], Uniform]) -> Tree:
        firsts = [choose(draft(()), uniform()) for _ in range(num_children)]
        seconds = [choose(draft((first,)), uniform()) for first in firsts]
        return (*firsts, *seconds), (*[-1] * num_children, *range(num_children))

    return law_of(draw)


@rules
@pytest.mark.parametrize("num_children", few([2, 3], ci=1))
def test_children_that_are_drawn_twice_are_passed_over(rule: Rule, num_children: int) -> None:
    for target, draft in PAIRS[:: num_children - 1]:
        law = mixed(rule, with_replacement(DRAFTS[draft], num_children), TARGETS[target], DRAFTS[draft])
        assert is_lossless(law, TARGETS[target], 2), (target, draft)


@rules
def test_without_a_draft_the_target_draws_alone(rule: Rule) -> None:
    for target in TARGETS.values():
        assert emitted(rule, SampledTree(), target, DRAFTS["one-hot"]) == target_law(target, 1)


NINE, FIVE = Model(probabilities(9, 1), {}), Model(probabilities(1, 1), {})


@pytest.mark.parametrize("shape", [(1,), (2, 1), (2, 2)], ids=str)
def test_the_deterministic_rule_allows_any_choice_among_what_was_drawn(shape: tuple[int, ...]) -> None:
    def unlikely(tree: Tree) -> list[int]:
        kept = list[int]()
        for node, (token, parent) in enumerate(zip(*tree, strict=True)):
            if token != 1 and (parent < 0 or parent in kept):
                kept.append(node)
        return kept[:3]

    for target, draft in PAIRS:
        law = mixed(verify_deterministic, trees_of(draft, shape), TARGETS[target], DRAFTS[draft], unlikely)
        assert is_lossless(law, TARGETS[target], 2), (target, draft)


def test_the_most_probable_tokens_are_no_draw_from_their_distribution() -> None:
    target, draft = TARGETS["all possible"], DRAFTS["all possible"]
    tree = rebuilt(((2, 0), (-1, -1)))
    law = emitted(verify_traversal, tree, target, draft)
    assert not is_lossless(law, target, 1)
    assert is_lossless(emitted(verify_deterministic, tree, target, draft), target, 1)
    one_hot = Model(probabilities(0, 0, 1), {})
    assert is_lossless(emitted(verify_traversal, rebuilt(((2,), (-1,))), target, one_hot), target, 1)
