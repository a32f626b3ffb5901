"""`LevelDrafter`: drafts token trees, or chains, of all rows level by level, each row within limits of its own.

Level by level as in SpecInfer (arXiv 2305.09781) and EAGLE-2 (arXiv 2406.16858); see `emssd.draft_models.shapes`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import Any

import torch

from emssd.attention.packed import on_device, to_host
from emssd.decoding.choosing import GREEDY, first_node
from emssd.draft_models.draft_cache import DraftCache
from emssd.draft_models.growing_tree import Child, GrowingRow, GrowingTree, Level
from emssd.draft_models.shapes import DynamicShape, Shape
from emssd.draft_models.top_tokens import Choices, after, likely_tokens, on_host
from emssd.drafting import Draft, Drafter, GoesOn, Tree, joined_trees
from emssd.drafting.budget import DraftedNode
from emssd.sampling.choice import Node
from emssd.sequences import Batch, Row

__all__ = ["LevelDrafter"]


class LevelDrafter(Drafter):
    """Drafts token trees, or chains, of all rows level by level.

    A subclass says which rows can be drafted for (`tree_of`), and computes logits: after the newest tokens
    (`catch_up`), after the nodes of a level (`compute`), and after the latest tokens of chains (`follow`). On a GPU the
    host waits once a level, for the likeliest tokens after each node. It waits once for chains that a `DynamicShape` is
    asked for, unless a row has penalties or a grammar, or a policy ends drafts.

    Args:
        shape: of the trees; one child for each node makes chains.
        vocab_size: the target's.
        cache: the KV of what drafts; ``None`` without a KV cache.

    Attributes:
        target_ids: ``[draft_vocab_size]`` the target's ids of the columns of logits; ``None`` if they are the same.
    """

    caches_nodes = True
    """Whether the nodes that get children enter the KV cache."""

    target_ids: torch.Tensor | None = None

    def __init__(self, shape: Shape, vocab_size: int, cache: DraftCache | None) -> None:
        self.num_speculative_tokens, self.drafts_trees = shape.num_nodes, shape.width > 1
        self.shape, self._vocab_size, self._cache = shape, vocab_size, cache
        self._goes_on: GoesOn | None = None
        self._all_greedy = False  # all rows of the draft
        self._known: Choices | None = None  # of all levels, those of a row one after the other
        self._starts: dict[str, int] = {}  # of each row among these

    def end_by(self, goes_on: GoesOn | None) -> None:
        self._goes_on = goes_on

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        rows = self._begin(batch, budget)
        return self._draft(batch, rows) if rows else Draft.empty(len(batch))

    def _draft(self, batch: Batch, rows: Seq[GrowingRow]) -> Draft:
        self._grow_trees(rows)
        self.finish(rows)
        trees = {row.request_id: row.tree for row in rows}
        drafted = [trees[name].drafted() if name in trees else Tree([], [], []) for name in batch.request_ids]
        return joined_trees(drafted, chains=not self.drafts_trees)

    @abstractmethod
    def tree_of(self, row: Row, num_nodes: int, depth: int) -> GrowingTree | None:
        """A tree without nodes for `row`, of at most so many nodes and levels; ``None`` if it cannot be drafted for."""

    @abstractmethod
    def catch_up(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        """Compute what is not cached. Returns the logits ``[r, draft_vocab_size]`` after the newest token of each."""

    @abstractmethod
    def compute(self, level: Level) -> torch.Tensor:
        """Compute the nodes of a level. Returns the logits ``[n, draft_vocab_size]`` after each."""

    def finish(self, rows: Seq[GrowingRow]) -> None:
        """The trees of these rows are done."""

    def follow(self, rows: Seq[GrowingRow], tokens: torch.Tensor, depth: int) -> torch.Tensor:
        """Compute the newest ``tokens [r]`` of chains of `depth` tokens; only a drafter that plans chains needs it.

        Returns the logits ``[r, draft_vocab_size]`` after them.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts no chains pass by pass")

    def follow_recorded(self, rows: Seq[GrowingRow], tokens: torch.Tensor, lengths: Seq[int]) -> torch.Tensor | None:
        """Compute all passes after the first ``tokens [r]`` of chains, see `emssd.model.ModelRunner.run_chain`."""
        return None

    def run_chain(self, rows: Seq[GrowingRow], logits: torch.Tensor, lengths: Seq[int]) -> torch.Tensor:
        """Draft chains. From pass to pass, their tokens stay on the device.

        Args:
            rows: without penalties and grammars.
            logits: ``[r, draft_vocab_size]`` after their newest tokens.
            lengths: ``[r]`` of the chains, at least 1.

        Returns:
            ``[2, k, r]`` float64, see `likely_tokens`. Anything stands after the end of a chain. It also ends after a
            token that is less likely than the shape asks for.
        """
        least = self.shape.least if isinstance(self.shape, DynamicShape) else -math.inf
        likely = [self._likely(logits, [row.node for row in rows])[..., 0]]
        while True:
            active = [i for i, length in enumerate(lengths) if length > len(likely)]
            if active and least > -math.inf:
                sure = (likely[-1][1] >= least).tolist()
                active = [i for i in active if sure[i]]
            if not active:
                return torch.stack(likely, dim=1)
            depth, some = len(likely), [rows[i] for i in active]
            index: Any = slice(None) if len(active) == len(rows) else on_device(active, logits.device)
            tokens = likely[-1][0, index].long().clamp_(min=0)
            if self._all_greedy and depth == 1:
                rest = self.follow_recorded(some, tokens, [lengths[i] - 1 for i in active])
                if rest is not None:
                    both = likely[0].unsqueeze(1).repeat(1, 1 + rest.shape[1], 1)
                    both[:, 1:, index] = self._to_target(rest)
                    return both
            nodes = [after(row.node, depth) for row in some]
            likely.append(likely[-1].clone())
            likely[-1][:, index] = self._likely(self.follow(some, tokens, depth), nodes)[..., 0]

    def _num_cached(self, row: Row) -> int:
        """The number of the row's tokens that need not be computed."""
        return 0

    def node_of(self, row: Row) -> Node:
        """The place where the target chooses the token after the newest one of `row`."""
        return GREEDY if row.request.sampling is None else first_node(row)

    def _begin(self, batch: Batch, budget: Seq[int]) -> list[GrowingRow]:
        rows = list[GrowingRow]()
        for row, limit in zip(batch, budget, strict=True) if any(budget) else ():
            num_nodes = min(limit, self.shape.num_nodes)
            depth = min(self.shape.depth, row.num_remaining - 1, num_nodes)
            tree = self.tree_of(row, num_nodes, depth) if depth > 0 else None
            if tree is not None and self.shape.expand(tree, tree.level):
                rows.append(GrowingRow(row.request_id, row.tokens, self.node_of(row), tree, self._num_cached(row)))
        if self._cache is not None:
            wanted = [(row.request_id, row.tree.num_tokens + row.tree.max_cached) for row in rows]
            rows = [row for row, fits in zip(rows, self._cache.with_room(wanted), strict=True) if fits]
        self._all_greedy, self._known = all(row.node.params.is_greedy for row in rows), None
        return rows

    def _grow_trees(self, rows: Seq[GrowingRow]) -> None:
        level = [(row, self.shape.expand(row.tree, row.tree.level)) for row in rows]
        logits = self.catch_up(rows)
        if self._runs_chain(rows):
            lengths = [min(row.tree.depth, row.tree.max_cached + 1) for row in rows]
            likely = self.run_chain(rows, logits, lengths).transpose(1, 2)
            self._known = on_host(likely.flatten(1).unsqueeze(2))
            starts = range(0, likely[0].numel(), likely.shape[2])
            self._starts = {row.request_id: start for row, start in zip(rows, starts, strict=True)}
        self._grow(level, logits)
        while level := self._next_level(self._going_on(level, logits)):
            if self._known is None or self._goes_on is not None:
                logits = self.compute(level)
            self._grow(level, logits)

    def _runs_chain(self, rows: Seq[GrowingRow]) -> bool:
        return (
            self.caches_nodes
            and self._goes_on is None
            and self.shape.width == 1
            and isinstance(self.shape, DynamicShape)
            and not any(row.node.params.reads_path for row in rows)
        )

    def _grow(self, level: Level, logits: torch.Tensor) -> None:
        left = zip(*self.choices(level, logits), strict=True)
        for row, expansions in level:
            children = list[Child]()
            for (node, ranks), (tokens, log_probs) in zip(expansions, left, strict=False):
                row.tree.choices[node] = tokens
                children += [(node, rank, tokens[rank], log_probs[rank]) for rank in ranks if rank < len(tokens)]
            row.tree.add_level(children)

    def choices(self, level: Level, logits: torch.Tensor) -> Choices:
        """The tokens after each node of a level that the target most likely chooses."""
        if self._known is None:
            return self._choices_from(level, logits)
        tokens, log_probs = self._known
        indices = self._indices_of(level)
        return [tokens[index] for index in indices], [log_probs[index] for index in indices]

    def _choices_from(self, level: Level, logits: torch.Tensor) -> Choices:
        return on_host(self._likely(logits, None if self._all_greedy else self._nodes(level)))

    def _indices_of(self, level: Level) -> list[int]:
        """The indices of a level's nodes among the nodes of all levels, row by row."""
        return [self._starts[row.request_id] + row.tree.num_levels for row, expansions in level for _ in expansions]

    def _nodes(self, level: Level) -> list[Node]:
        """The nodes at which the target chooses the tokens after a level."""
        nodes = list[Node]()
        for row, expansions in level:
            first, depth, tree = row.node, row.tree.num_levels, row.tree
            if first.params.reads_path:
                nodes += [after(first, depth, tree.path(node)) for node, _ in expansions]
            else:
                nodes += [after(first, depth)] * len(expansions)
        return nodes

    def _likely(self, logits: torch.Tensor, nodes: Seq[Node] | None) -> torch.Tensor:
        """``[2, n, width]``, see `likely_tokens`: the target's tokens after nodes, from ``[n, draft_vocab_size]``.

        Where all nodes are greedy, only the drafter's own columns are looked at. Otherwise noise, penalties and biases
        need all of the target's tokens: a token without a column is impossible there.
        """
        width, temperature = min(self.shape.width, logits.shape[1]), self.shape.temperature
        if self._all_greedy or nodes is None:
            return self._to_target(likely_tokens(logits, None, width, temperature))
        if self.target_ids is not None:
            wide = logits.new_full((len(logits), self._vocab_size), -math.inf)
            wide[:, self.target_ids] = logits
            logits = wide
        return likely_tokens(logits, nodes, width, temperature)

    def _to_target(self, likely: torch.Tensor) -> torch.Tensor:
        """`likely_tokens` of columns, as those of the target's ids."""
        if self.target_ids is None:
            return likely
        return torch.stack([self.target_ids[likely[0].long()].double(), likely[1]])

    def _going_on(self, level: Level, logits: torch.Tensor) -> list[GrowingRow]:
        """The rows of a level that are drafted further, once it has grown: all, or those that a budget policy names."""
        if self._goes_on is None:
            return [row for row, _ in level]
        entropies = torch.special.entr((logits.double() / self.shape.temperature).softmax(dim=-1)).sum(dim=-1)
        left, newest = iter(to_host(entropies.nan_to_num(math.log(logits.shape[1])))), dict[str, list[DraftedNode]]()
        for row, expansions in level:
            tree, entropy = row.tree, {node: next(left) for node, _ in expansions}
            newest[row.request_id] = [
                DraftedNode(math.exp(tree.log_probs[node]), math.exp(tree.scores[node]), entropy[tree.parents[node]])
                for node in tree.level
            ]
        going = self._goes_on(newest)
        return [row for row, _ in level if row.request_id in going]

    def _next_level(self, rows: Seq[GrowingRow]) -> Level:
        level: Level = []
        for row in rows:
            tree = row.tree
            expansions = self.shape.expand(tree, tree.frontier())
            if self.caches_nodes:
                expansions = expansions[: tree.max_cached - len(tree.cached)]
                tree.cache([node for node, _ in expansions])
            if expansions:
                level.append((row, expansions))
        return level
