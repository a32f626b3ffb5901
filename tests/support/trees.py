"""Trees and drafts of trees: drawn, written out as paths, and drafters of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from emssd_testing.drafters import TreeDrafter
from emssd_testing.strategies import trees
from hypothesis import strategies as st

from emssd.attention.trees import Parents
from emssd.drafting import Draft, Drafter
from emssd.sequences import Batch, Request, Row
from tests.support.backends import BACKENDS

TREE_BACKENDS = {name: make for name, make in BACKENDS.items() if make().takes_trees}

Tree = list[tuple[int, int]]  # for each node its token, and the index of its parent or -1
Path = tuple[int, ...]


@st.composite
def drawn_trees(draw: st.DrawFn, max_nodes: int = 7, vocab_size: int = 4) -> Tree:
    """Up to `max_nodes` nodes in any shape; with few tokens siblings are often equal."""
    parents = draw(trees(draw(st.integers(0, max_nodes))))
    return [(draw(st.integers(0, vocab_size - 1)), parent) for parent in parents]


class DecoyDrafter(TreeDrafter):
    """Drafts what the target is going to generate, each token after a wrong sibling with a child of its own.

    So all that is right is accepted, and its KV always has to move. Needs the references.

    Args:
        vocab_size, references: see `emssd_testing.drafters.ChainDrafter`.
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


def sequence(tokens: Seq[int], name: str = "a", max_new_tokens: int = 100) -> Row:
    return Row(Request(name, tuple(tokens), max_new_tokens))


def row_of(prompt: Seq[int], output: Seq[int] = (), name: str = "a", max_new_tokens: int = 100) -> Row:
    """A row whose prompt is `prompt`, and that has generated `output`."""
    return Row(Request(name, tuple(prompt), max_new_tokens), [*prompt, *output])


def chains_of(draft: Draft) -> list[list[int]]:
    """The token ids of each row of a draft."""
    tokens = draft.token_ids.tolist()
    return [tokens[start:stop] for start, stop in zip(draft.indptr, draft.indptr[1:], strict=False)]


def paths(token_ids: Seq[int], parents: Parents) -> list[tuple[int, ...]]:
    """The tokens on the way to each node of a tree, the node's own last."""
    tokens_by_node: list[tuple[int, ...]] = []
    for token, parent in zip(token_ids, parents, strict=True):
        tokens_by_node.append(((*tokens_by_node[parent], token)) if parent >= 0 else (token,))
    return tokens_by_node


def ways(parents: Parents) -> list[list[int]]:
    """The nodes on the way to each node of a tree, the node itself last."""
    return [list(way) for way in paths(range(len(parents)), parents)]


def eagle2_tree(
    likeliest: Callable[[Path, int], Seq[tuple[int, float]]], num_nodes: int, depth: int, top_k: int
) -> dict[Path, float]:
    """EAGLE-2, Algorithm 1 of its appendix: expand the best of each level, and rank all again in the end.

    Returns the share of each path's last token, by `likeliest` tokens after paths and their logarithms of probability.
    """
    beam, pool, shares = {(): 0.0}, dict[Path, float](), dict[Path, float]()
    for _ in range(depth):
        level = {}
        for way, score in beam.items():
            for token, share in likeliest(way, top_k):
                level[(*way, token)] = score + share
                shares[(*way, token)] = math.exp(share)
        pool |= level
        beam = dict(sorted(level.items(), key=lambda scored: -scored[1])[:top_k])
    return {way: shares[way] for way in sorted(pool, key=lambda way: -pool[way])[:num_nodes]}


def paths_of(draft: Draft, row: int = 0) -> list[tuple[int, ...]]:
    """The same for a row of a draft."""
    return paths(draft.token_ids[draft.indptr[row] : draft.indptr[row + 1]].tolist(), draft.tree(row))


def tree_of(drafter: Drafter, row: Row, budget: int, vocab_size: int = 99) -> Draft:
    """The draft of `drafter` for one row, tested against the rules."""
    batch = Batch((row,))
    draft = drafter.propose(batch, [budget])
    draft.check(batch, [budget], vocab_size, trees=drafter.drafts_trees)
    return draft
