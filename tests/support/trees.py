"""Trees that several test files draw, and the way to a node, written out by hand."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from hypothesis import strategies as st

from emssd.testing.strategies import trees

__all__ = ["Tree", "drawn_trees", "way"]

Tree = list[tuple[int, int]]  # for each node its token, and the index of its parent or -1


@st.composite
def drawn_trees(draw: st.DrawFn, max_nodes: int = 7, vocab_size: int = 4) -> Tree:
    """Up to `max_nodes` nodes in any shape; with few tokens siblings are often equal."""
    parents = draw(trees(draw(st.integers(0, max_nodes))))
    return [(draw(st.integers(0, vocab_size - 1)), parent) for parent in parents]


def way(parents: Seq[int], node: int) -> list[int]:
    """The nodes from the tree's origin to `node`, itself included."""
    return [] if node < 0 else [*way(parents, parents[node]), node]
