"""Drafts token trees, or chains, with a model: all rows level by level, each within limits of its own.

Level by level as in SpecInfer (arXiv 2305.09781) and EAGLE-2 (arXiv 2406.16858); see `emssd.drafting.shapes`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from emssd.decoding.packing import pack_nodes
from emssd.decoding.top_tokens import top_choices
from emssd.drafters.base import CachedRow, ModelDrafter
from emssd.drafting import Draft, Outcome
from emssd.drafting.levels import GrowingTree, going_on, joined_best
from emssd.drafting.shapes import Expansion, Shape
from emssd.model import ModelRunner
from emssd.sampling.draws import behind
from emssd.sequences import Batch

__all__ = ["Level", "TreeDrafter"]

Level = list[tuple[CachedRow, GrowingTree, list[Expansion]]]
"""What is expanded in one pass: for each row its tree, and the nodes."""


class TreeDrafter(ModelDrafter):
    """Drafts trees. Only nodes that get children are computed; the KV of those on the accepted way is kept.

    Each level is one pass of the draft model for all rows. On a GPU the host waits once a level, for the likeliest
    tokens behind each node; twice in a batch of greedy and sampled rows.

    Args:
        runner: the draft model; its KV cache takes trees if `shape` has any.
        vocab_size: the target's; ids beyond it are never drafted.
        shape: of the trees; one child for each node makes chains.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, shape: Shape) -> None:
        super().__init__(runner, vocab_size)
        self.num_speculative_tokens, self.drafts_trees = shape.num_nodes, shape.width > 1
        self.shape = shape
        self._trees: dict[str, GrowingTree] = {}  # of the latest draft

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._trees = {}
        level = self._begin(batch, budget)
        if not level:
            return Draft.empty(len(batch))
        trees = {row.request_id: tree for row, tree, _ in level}
        logits = self._catch_up([row for row, *_ in level])
        self._grow(level, logits)
        while level := self._next_level(self._going_on(level, logits)):
            logits = self._compute(level)
            self._grow(level, logits)
        self._trees = trees
        return joined_best([trees.get(row.request_id) for row in batch], chains=not self.drafts_trees)

    def observe(self, outcome: Outcome) -> None:
        """Keep the KV of the accepted way, moved together, and drop the rest. Count what the target chose."""
        kv_lens, sources = {}, {}
        for row in outcome.batch:
            if (tree := self._trees.pop(row.request_id, None)) is None:
                continue
            tokens = row.tokens[tree.num_tokens :]
            self.shape.learn(_ranks(tree, tokens))
            places = {node: place for place, node in enumerate(tree.cached)}
            # The newest token is the input of the next pass, also where the draft has it.
            kept = [places[node] for node in tree.follow(tokens[:-1]) if node in places]
            kv_lens[row.request_id] = tree.num_tokens + len(kept)
            moved = kept != list(range(len(kept)))
            sources[row.request_id] = tuple(tree.num_tokens + place for place in kept) if moved else ()
        self.shape.replan()
        self._keep(kv_lens, sources)

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        super().release(request_ids)
        for request_id in request_ids:
            self._trees.pop(request_id, None)

    def reset(self) -> None:
        self.shape.reset()

    def _begin(self, batch: Batch, budget: Seq[int]) -> Level:
        """A tree without nodes for each row that may and can draft, and what becomes of its newest token."""
        trees: list[GrowingTree | None] = []
        for row, limit in zip(batch, budget, strict=True):
            reach = self._reach(row) if limit > 0 else 0
            num_nodes, depth = min(limit, self.shape.num_nodes), min(self.shape.depth, row.num_remaining - 1, reach)
            drafts = num_nodes > 0 and depth > 0
            most_cached = min(self.shape.most_cached(num_nodes, depth), reach) if drafts else 0
            trees.append(GrowingTree(len(row.tokens), num_nodes, depth, most_cached) if drafts else None)
        room = self._with_room(batch, [0 if tree is None else tree.num_tokens + tree.max_cached for tree in trees])
        level = [
            (self._row(row), tree, self.shape.expand(tree, tree.level))
            for row, tree, fits in zip(batch, trees, room, strict=True)
            if tree is not None and fits
        ]
        return [each for each in level if each[2]]

    def _going_on(self, level: Level, logits: torch.Tensor) -> list[tuple[CachedRow, GrowingTree]]:
        """The rows of a level that are drafted further, once it has grown from ``logits [n, vocab]``."""
        grown = ((row.request_id, tree, expansions) for row, tree, expansions in level)
        going = going_on(self._goes_on, grown, logits, self.shape.temperature)
        return [(row, tree) for row, tree, _ in level if row.request_id in going]

    def _next_level(self, rows: list[tuple[CachedRow, GrowingTree]]) -> Level:
        """The rows that are not done, with the nodes to expand."""
        level = []
        for row, tree in rows:
            expansions = self.shape.expand(tree, tree.frontier())[: tree.max_cached - len(tree.cached)]
            if expansions:
                tree.cached.extend(node for node, _ in expansions)
                level.append((row, tree, expansions))
        return level

    def _compute(self, level: Level) -> torch.Tensor:
        """Compute the nodes of a level. Returns the logits behind each, ``[n, vocab]``."""
        tokens = [tree.token_ids[node] for _, tree, expansions in level for node, _ in expansions]
        packed = pack_nodes(
            [row.request_id for row, _, _ in level],
            torch.tensor(tokens, dtype=torch.int64),
            [len(expansions) for _, _, expansions in level],
            [tree.num_tokens + len(tree.cached) for _, tree, _ in level],
            [tree.cached_parents() for _, tree, _ in level],
        )
        return self._known(self._runner.run(packed).logits)

    def _grow(self, level: Level, logits: torch.Tensor) -> None:
        """Give each node of a level its children, from ``logits [n, vocab]``."""
        nodes = [
            behind(row.node, len(path := tree.path(node)), path)
            for row, tree, expansions in level
            for node, _ in expansions
        ]
        tokens, log_probs = top_choices(logits, nodes, self.shape.width, self.shape.temperature)
        place = 0
        for _, tree, expansions in level:
            tree.level = []
            for node, ranks in expansions:
                tree.grow(node, ranks, tokens[place], log_probs[place])
                place += 1


def _ranks(tree: GrowingTree, tokens: Seq[int]) -> list[int | None]:
    """What the target chose, as `Shape.learn` wants it, from a row's new `tokens`."""
    ranks: list[int | None] = []
    for node, token in zip([-1, *tree.follow(tokens)], tokens, strict=False):
        if node not in tree.choices:
            break
        choices = tree.choices[node]
        ranks.append(choices.index(token) if token in choices else None)
    return ranks
