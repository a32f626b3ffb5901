"""Trees, their distributions, and the law of stochastic beams, in fractions; beams are the first texts of a race."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

from emssd_residual.distributions import choose, excess, number, without
from emssd_residual.rules import Verdict

from tests.support.drawing import SampledTree, rsd_c
from tests.support.exact import Law, Model, Rule, add_up, behind, emitted, law_of, probabilities

Tree = tuple[tuple[int, ...], tuple[int, ...]]  # tokens and parents

_even = probabilities(1, 1, 1)
TARGETS = {
    "all possible": Model(
        probabilities(2, 1, 1),
        {(): probabilities(3, 2, 1), (0,): probabilities(1, 1, 4), (1,): probabilities(5, 1, 2), (2,): _even},
    ),
    "with zeros": Model(
        probabilities(0, 1, 2),
        {(): probabilities(0, 1, 3), (1,): probabilities(1, 0, 0), (2,): probabilities(1, 0, 1)},
    ),
    "certain at first": Model(_even, {(): probabilities(0, 0, 1), (2,): probabilities(1, 2, 0)}),
}
DRAFTS = {
    "all possible": Model(probabilities(1, 2, 3), {(): probabilities(1, 1, 2), (0,): probabilities(3, 1, 1)}),
    "with zeros": Model(probabilities(0, 2, 1), {(): probabilities(1, 1, 0), (0,): probabilities(1, 0, 3)}),
    "one-hot": Model(probabilities(1, 0, 0), {(): probabilities(0, 1, 0)}),
}
PAPER = Model(probabilities(1, 2), {}), Model(probabilities(2, 1), {})  # of block verification, arXiv 2403.10444, §1


@cache
def trees_of(draft: str | Model, branching: tuple[int, ...]) -> dict[Tree, Fraction]:
    """The probabilities of all trees that `rsd_c` draws from a draft, or from that of this name."""
    model = DRAFTS[draft] if isinstance(draft, str) else draft

    def drawn(uniform: Callable[[], object]) -> Tree:
        tree = rsd_c(behind(model), branching, uniform)
        return tuple(tree.token_ids), tuple(tree.parents)

    return law_of(drawn)


def rebuilt(tree: Tree) -> SampledTree:
    """The same without distributions."""
    return SampledTree([*tree[0]], [*tree[1]])


def mixed(
    rule: Rule, trees: dict[Tree, Fraction], target: Model, draft: Model, keep: Callable[[Tree], Seq[int]] | None = None
) -> Law:
    """The law of what a step emits, over all trees; `keep` says which nodes of a tree are left to verify."""
    left = (
        trees
        if keep is None
        else add_up((chance, {_kept(tree, keep(tree)): Fraction(1)}) for tree, chance in trees.items())
    )
    return add_up((chance, emitted(rule, rebuilt(tree), target, draft)) for tree, chance in left.items())


def _kept(tree: Tree, nodes: Seq[int]) -> Tree:
    places = {node: index for index, node in enumerate(nodes)} | {-1: -1}
    return tuple(tree[0][node] for node in nodes), tuple(places[tree[1][node]] for node in nodes)


def token_by_token(
    target: Any, draft: Any, token_ids: Seq[int], parents: Seq[int], uniform: Callable[[], Any]
) -> Verdict:
    """Recursive rejection without replacement (Jeon et al. 2024, arXiv 2402.14160), from the origin down.

    On a chain it is speculative sampling (Leviathan et al. 2023; Chen et al. 2023). The product's rules accept more.
    """
    accepted, node = list[int](), -1
    while True:
        left, drawable = target[node + 1], draft[node + 1]
        for child in [child for child, parent in enumerate(parents) if parent == node]:
            token = token_ids[child]
            if (chance := number(drawable[token])) > 0:
                if uniform() < number(left[token]) / chance:
                    accepted.append(child)
                    break
                left, drawable = excess(1, left, drawable)[1], without(drawable, token)
        if not accepted or accepted[-1] == node:
            return Verdict(accepted, choose(left, uniform()))
        node = accepted[-1]


Text = tuple[int, ...]


def beam_of(arrivals: list[Text], width: int, depth: int) -> Tree:
    """The tree of the first `width` beginnings of each length, given all texts of length `depth` as they arrive."""
    tree = SampledTree()
    nodes: dict[Text, int] = {(): -1}
    for length in range(1, depth + 1):
        for text in list(dict.fromkeys(text[:length] for text in arrivals))[:width]:
            nodes[text] = tree.add(nodes[text[:-1]], text[-1], None)  # type: ignore[arg-type]
    return tuple(tree.token_ids), tuple(tree.parents)


def beam_trees(draft: Model, width: int, depth: int, num_tokens: int = 3) -> dict[Tree, Fraction]:
    """The probabilities of all trees. The next text to arrive is drawn in proportion to its probability."""
    chances = {}
    for text in product(range(num_tokens), repeat=depth):
        chance = Fraction(1)
        for index, token in enumerate(text):
            chance *= draft(text[:index])[token]
        if chance:
            chances[text] = chance
    totals: dict[Tree, Fraction] = {}

    def arrive(before: list[Text], chance: Fraction, left: Fraction) -> None:
        enough = all(len({text[:length] for text in before}) >= width for length in range(1, depth + 1))
        if enough or len(before) == len(chances):
            tree = beam_of(before, width, depth)
            totals[tree] = totals.get(tree, Fraction(0)) + chance
            return
        for text, weight in chances.items():
            if text not in before:
                arrive([*before, text], chance * weight / left, left - weight)

    arrive([], Fraction(1), Fraction(1))
    return totals
