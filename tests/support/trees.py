"""Trees that several test files draw, and drafters of trees."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from hypothesis import strategies as st

from emssd.drafting import Draft
from emssd.sequences import Batch, Row
from emssd.testing.drafters import TreeDrafter
from emssd.testing.strategies import trees
from tests.support.backends import BACKENDS

__all__ = ["TREE_BACKENDS", "DecoyDrafter", "MixedDrafter", "Tree", "drawn_trees"]

TREE_BACKENDS = {name: make for name, make in BACKENDS.items() if make().takes_trees}

Tree = list[tuple[int, int]]  # for each node its token, and the index of its parent or -1


@st.composite
def drawn_trees(draw: st.DrawFn, max_nodes: int = 7, vocab_size: int = 4) -> Tree:
    """Up to `max_nodes` nodes in any shape; with few tokens siblings are often equal."""
    parents = draw(trees(draw(st.integers(0, max_nodes))))
    return [(draw(st.integers(0, vocab_size - 1)), parent) for parent in parents]


class DecoyDrafter(TreeDrafter):
    """Drafts what the target is going to generate, each token after a wrong sibling with a child of its own.

    So all that is right is accepted, and its KV always has to move. Needs the references.

    Args:
        vocab_size, references: see `emssd.testing.drafters.ChainDrafter`.
        depth: of the trees, which have three nodes at each depth.
    """

    def __init__(self, vocab_size: int, references: Mapping[Any, Seq[int]], depth: int = 3) -> None:
        super().__init__(vocab_size, 3 * depth, references)

    def tree(self, row: Row, limit: int) -> Tree:
        nodes: Tree = []
        parent = -1
        for token in self.upcoming(row)[: limit // 3]:
            wrong = (token + 1) % self.vocab_size
            nodes += [(wrong, parent), (token, parent), (token, len(nodes))]
            parent = len(nodes) - 2
        return nodes


class MixedDrafter(TreeDrafter):
    """Drafts trees for some rows, chains for others, and nothing for the rest, by the number in their request ids."""

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        trees = []
        for row, limit in zip(batch, budget, strict=True):
            tree = self.tree(row, limit)
            match int(row.request_id) % 3:
                case 0:
                    tree = [(token, node - 1) for node, (token, _) in enumerate(tree)]
                case 1:
                    tree = []
            trees.append(tree)
        return Draft.from_trees(trees).shallow([max(0, row.num_remaining - 1) for row in batch])
