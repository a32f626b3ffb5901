"""Trees are drawn without replacement: their shapes, their laws, and what verification is told of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawing import SampledTree, rsd_c, rsd_s
from tests.support.exact import Model, behind, probabilities, way
from tests.support.residual_cases import DRAFTS, Tree, beam_of, beam_trees, trees_of

VOCAB = 4


def floats(model: Model) -> Callable[[SampledTree, Seq[int]], list[torch.Tensor]]:
    return lambda tree, nodes: [torch.from_numpy(q.astype(np.float64)) for q in behind(model)(tree, nodes)]


class Noise:
    """Exponentials that belong to a text, whichever tree it stands in."""

    def __init__(self, seed: int, vocab: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.rand(vocab**3, vocab, generator=generator, dtype=torch.float64).mul(4).sub(2)
        self.table = torch.empty(vocab**3, vocab, dtype=torch.float64).exponential_(generator=generator)
        self.places, self.vocab = list[int](), vocab

    def behind(self, tree: SampledTree, nodes: Seq[int]) -> list[torch.Tensor]:
        numbers = [[token + 1 for token in way(tree, node)] for node in nodes]
        self.places = [sum(n * (self.vocab + 1) ** i for i, n in enumerate(text)) for text in numbers]
        assert max(self.places) < len(self.table)
        return list(self.logits[self.places].softmax(dim=1))

    def __call__(self, num_nodes: int) -> torch.Tensor:
        assert num_nodes == len(self.places)
        return self.table[self.places]


def as_tree(tree: SampledTree) -> Tree:
    return tuple(tree.token_ids), tuple(tree.parents)


def test_children_are_drawn_without_replacement() -> None:
    q = DRAFTS["all possible"](())
    expected = {
        ((one, two), (-1, -1)): q[one] * q[two] / (1 - q[one]) for one in range(3) for two in range(3) if one != two
    }
    assert trees_of("all possible", (2,)) == expected


def test_verification_is_told_what_children_were_drawn_from() -> None:
    noise, generator = Noise(3), torch.Generator().manual_seed(0)
    for tree in (
        rsd_c(noise.behind, (2, 2), lambda: torch.rand((), generator=generator).item()),
        rsd_s(noise.behind, 3, 3, noise),
    ):
        assert len(tree.draft) == len(tree.token_ids) + 1
        for node, q in zip(range(-1, len(tree.token_ids)), tree.draft, strict=True):
            expected = noise.behind(tree, [node])[0] if node in tree.parents else torch.empty(0)
            assert torch.equal(q, expected)


@given(st.integers(0, 2**20), st.integers(1, 8), st.integers(1, 3))
def test_a_beam_is_the_first_of_all_texts_to_arrive(seed: int, width: int, depth: int) -> None:
    noise = Noise(seed, 3)
    everything = rsd_s(noise.behind, 3**depth, depth, noise)
    ways = [way(everything, node) for node in range(len(everything.token_ids))]
    arrivals = [text for text in ways if len(text) == depth]  # levels are ordered by arrival
    assert len(arrivals) == 3**depth
    assert as_tree(rsd_s(noise.behind, width, depth, noise)) == beam_of(arrivals, width, depth)


def deviation(counts: Counter[Tree], law: dict[Tree, Fraction]) -> float:
    """The G statistic of `counts` in standard deviations above its mean, roughly."""
    total = sum(counts.values())
    assert set(counts) <= set(law)
    statistic = 2 * sum(count * math.log(count / (total * law[tree])) for tree, count in counts.items())
    return (statistic - (len(law) - 1)) / math.sqrt(2 * (len(law) - 1))


TWO_TOKENS = Model(probabilities(2, 1), {(0,): probabilities(1, 5), (1,): probabilities(7, 1)})


@pytest.mark.parametrize(
    ("width", "depth", "draft"),
    [(1, 2, DRAFTS["all possible"]), (2, 2, DRAFTS["all possible"]), (3, 2, DRAFTS["with zeros"]), (2, 3, TWO_TOKENS)],
)
def test_beams_have_the_law_of_an_exponential_race(width: int, depth: int, draft: Model) -> None:
    generator, vocab = torch.Generator().manual_seed(7), len(draft.rest)
    law = beam_trees(draft, width, depth, vocab)

    def drawn(noise: Callable[[int], torch.Tensor]) -> Counter[Tree]:
        return Counter(as_tree(rsd_s(floats(draft), width, depth, noise)) for _ in range(1500))

    def exponential(num_nodes: int) -> torch.Tensor:
        return torch.empty(num_nodes, vocab, dtype=torch.float64).exponential_(generator=generator)

    assert deviation(drawn(exponential), law) < 4
    assert deviation(drawn(lambda num_nodes: exponential(num_nodes).sqrt()), law) > 20


def test_what_cannot_follow_is_not_in_a_beam() -> None:
    draft = floats(DRAFTS["one-hot"])
    noise = torch.ones(9, 3, dtype=torch.float64)
    assert as_tree(rsd_s(draft, 5, 3, lambda num_nodes: noise[:num_nodes])) == ((1, 0, 0), (-1, 0, 1))
    nothing = torch.zeros(3, dtype=torch.float64)
    tree = rsd_s(lambda tree, nodes: [nothing] * len(nodes), 2, 3, lambda num_nodes: noise[:num_nodes])
    assert as_tree(tree) == ((), ())
