"""The law of stochastic beams in fractions, from what they are: the first texts to arrive in an exponential race."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

from emssd.sampling.residual import SampledTree
from tests.sampling.cases import Tree
from tests.sampling.exact import Model

__all__ = ["beam_of", "beam_trees"]

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
        for place, token in enumerate(text):
            chance *= draft(text[:place])[token]
        if chance:
            chances[text] = chance
    found: dict[Tree, Fraction] = {}

    def arrive(before: list[Text], chance: Fraction, left: Fraction) -> None:
        enough = all(len({text[:length] for text in before}) >= width for length in range(1, depth + 1))
        if enough or len(before) == len(chances):
            tree = beam_of(before, width, depth)
            found[tree] = found.get(tree, Fraction(0)) + chance
            return
        for text, own in chances.items():
            if text not in before:
                arrive([*before, text], chance * own / left, left - own)

    arrive([], Fraction(1), Fraction(1))
    return found
