"""`LevelDrafter`: drafts token trees, or chains, of all rows level by level, each row within limits of its own.

Level by level as in SpecInfer (arXiv 2305.09781) and EAGLE-2 (arXiv 2406.16858); see `emssd.drafting.shapes`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch

from emssd.attention import PackedInputs
from emssd.attention.packed import on_device, to_host
from emssd.decoding.choosing import GREEDY, first_node
from emssd.decoding.packing import pack_nodes
from emssd.decoding.top_tokens import behind, likelihood, top_choices, top_tokens
from emssd.drafters.lanes import Lane
from emssd.drafting import Draft, Drafter, GoesOn, Tree, joined_trees
from emssd.drafting.budget import DraftedNode
from emssd.drafting.levels import Child, Expansion, GrowingTree
from emssd.drafting.shapes import DynamicShape, Shape
from emssd.model.program import Growth
from emssd.model.runner import likeliest
from emssd.sampling.choice import Node
from emssd.sequences import Batch, Row

__all__ = ["GrowingRow", "Level", "LevelDrafter", "SlotDrafter", "nodes_of", "pack_level"]


@dataclass(frozen=True, slots=True)
class GrowingRow:
    """A row that is drafted for.

    Attributes:
        tokens: ``[n]``.
        node: where the target chooses the token after the newest one.
        tree: that grows after the newest token.
        num_cached: tokens that the drafter's KV cache holds.
    """

    request_id: str
    tokens: Seq[int]
    node: Node
    tree: GrowingTree
    num_cached: int = 0


Level = list[tuple[GrowingRow, list[Expansion]]]
"""The nodes that one pass expands, of each row. All nodes of a row are equally deep."""

Choices = tuple[list[list[int]], list[list[float]]]
"""For each node the likeliest tokens after it, the likeliest first, and the logarithms of how likely they are."""


class LevelDrafter(Drafter):
    """Drafts token trees, or chains, of all rows level by level.

    A subclass says which rows can be drafted for (`tree_of`), and computes logits: after the newest tokens
    (`catch_up`), and after the nodes of a level (`compute`). On a GPU the host waits once a level, for the likeliest
    tokens after each node; twice in a batch of greedy and sampled rows.

    Args:
        shape: of the trees; one child for each node makes chains.
        vocab_size: the target's.
        lane: the KV of what drafts; ``None`` without a KV cache.

    Attributes:
        target_ids: ``[draft_vocab_size]`` the target's ids of the columns of logits; ``None`` if they are the same.
    """

    caches_nodes = True
    """Whether the nodes that get children enter the KV cache."""

    target_ids: torch.Tensor | None = None

    def __init__(self, shape: Shape, vocab_size: int, lane: Lane | None) -> None:
        self.num_speculative_tokens, self.drafts_trees = shape.num_nodes, shape.width > 1
        self.shape, self._vocab_size, self._lane = shape, vocab_size, lane
        self._goes_on: GoesOn | None = None
        self._all_greedy = False  # all rows of the draft

    def end_by(self, goes_on: GoesOn | None) -> None:
        self._goes_on = goes_on

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        rows = self._begin(batch, budget)
        if not rows:
            return Draft.empty(len(batch))
        self._all_greedy = False not in [row.node is GREEDY or row.node.params.is_greedy for row in rows]
        if not self.grow_at_once(rows):
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

    def grow_at_once(self, rows: Seq[GrowingRow]) -> bool:
        """Draft all levels in one call, if that can be; returns whether it was done."""
        return False

    @property
    def is_greedy_growth(self) -> bool:
        """Whether `Program.grow` drafts what is asked for."""
        return self._goes_on is None and isinstance(self.shape, DynamicShape) and self._all_greedy

    def growth_of(self, rows: Seq[GrowingRow], table: torch.Tensor | None = None) -> Growth:
        """The drafts that `Program.grow` is to make."""
        shape, trees = self.shape, [row.tree for row in rows]
        assert isinstance(shape, DynamicShape), "trees of another shape"
        return Growth(
            depths=[tree.depth for tree in trees],
            num_nodes=[tree.num_nodes for tree in trees],
            rooms=[tree.max_cached for tree in trees],
            vocab_size=self._vocab_size,
            table=table,
            target_ids=self.target_ids,
            width=shape.width,
            scale=1.0 / shape.temperature,
            least=shape.least,
        )

    def take(self, rows: Seq[GrowingRow], tokens: torch.Tensor, shares: torch.Tensor) -> None:
        """Let trees grow by what `Program.grow` has found, as they have grown there."""
        ids, log_probs = iter(tokens.tolist()), iter(shares.tolist())

        def choices(level: Level) -> Choices:
            number = len(nodes_of(level))
            return [*islice(ids, number)], [*islice(log_probs, number)]

        self._take(rows, choices)
        assert next(ids, None) is None, "other nodes were computed"

    def _take(self, rows: Seq[GrowingRow], choices: Callable[[Level], Choices]) -> None:
        level = self._first_level(rows)
        while level:
            self._add(level, choices(level))
            level = self._next_level([row for row, _ in level])

    plans_passes: bool = False
    """Whether `passes` may do something."""

    def passes(
        self, rows: Seq[GrowingRow], columns: torch.Tensor, growth: Growth, places: Seq[int]
    ) -> torch.Tensor | None:
        """Compute the nodes of chains, see `emssd.model.ModelRunner.run_passes`.

        Args:
            rows: with more than one token to draft.
            columns: ``[r]`` the first of them, as columns of logits.
            growth: the passes.
            places: ``[r]`` the rows among those of `catch_up`.
        """
        return None

    def _grow_behind(self, rows: Seq[GrowingRow], logits: torch.Tensor) -> bool:
        """Draft chains in one call, of `logits` after the newest tokens; the host waits once. False: not done."""
        growth = self.growth_of(rows)
        lengths = [min(depth, room + 1) for depth, room in zip(growth.depths, growth.rooms, strict=True)]
        places = [place for place, length in enumerate(lengths) if length > 1]
        if not places:
            return False
        first, index = likeliest(logits, 1, growth.scale)[..., 0], on_device(places, logits.device)
        own = growth._replace(depths=[lengths[place] - 1 for place in places])
        found = self.passes([rows[place] for place in places], first[0, index].long(), own, places)
        if found is None:
            return False
        both = torch.cat([first.unsqueeze(1), first.unsqueeze(1).repeat(1, len(found[0]), 1)], dim=1)
        both[:, 1:, index] = found
        tokens, shares = torch.tensor(to_host(both.flatten())).view(both.shape).tolist()
        ids = range(self._vocab_size) if self.target_ids is None else self._ids
        place_of = {row.request_id: place for place, row in enumerate(rows)}

        def choices(level: Level) -> Choices:
            at = [(row.tree.num_levels, place_of[row.request_id]) for row, _ in level]
            return (
                [[ids[int(tokens[number][place])]] for number, place in at],
                [[likelihood(shares[number][place])] for number, place in at],
            )

        self._take(rows, choices)
        return True

    def _num_cached(self, row: Row) -> int:
        """Of the row's tokens, how many need not be computed."""
        return 0

    def node_of(self, row: Row) -> Node:
        """The place where the target chooses the token after the newest one of `row`."""
        return GREEDY if row.request.sampling is None else first_node(row)

    def _begin(self, batch: Batch, budget: Seq[int]) -> list[GrowingRow]:
        rows = list[GrowingRow]()
        for row, limit in zip(batch, budget, strict=True):
            num_nodes = min(limit, self.shape.num_nodes)
            depth = min(self.shape.depth, row.num_remaining - 1, num_nodes)
            tree = self.tree_of(row, num_nodes, depth) if depth > 0 else None
            if tree is not None and self.shape.expand(tree, tree.level):
                rows.append(GrowingRow(row.request_id, row.tokens, self.node_of(row), tree, self._num_cached(row)))
        if self._lane is None:
            return rows
        fitting = self._lane.with_room([(row.request_id, row.tree.num_tokens + row.tree.max_cached) for row in rows])
        return [row for row, fits in zip(rows, fitting, strict=True) if fits]

    def _grow_trees(self, rows: Seq[GrowingRow]) -> None:
        level, logits = self._first_level(rows), self.catch_up(rows)
        is_chain = self.shape.width == 1 and self.caches_nodes and self.is_greedy_growth
        if is_chain and self.plans_passes and self._grow_behind(rows, logits):
            return
        self._grow(level, logits)
        while level := self._next_level(self._going_on(level, logits)):
            logits = self.compute(level)
            self._grow(level, logits)

    def _grow(self, level: Level, logits: torch.Tensor) -> None:
        self._add(level, self.choices(level, logits))

    def _add(self, level: Level, choices: Choices) -> None:
        left = zip(*choices, strict=True)
        for row, expansions in level:
            children = list[Child]()
            for (node, ranks), (tokens, log_probs) in zip(expansions, left, strict=False):
                row.tree.choices[node] = tokens
                children += [(node, rank, tokens[rank], log_probs[rank]) for rank in ranks if rank < len(tokens)]
            row.tree.add_level(children)

    def choices(self, level: Level, logits: torch.Tensor) -> Choices:
        """The tokens after each node of a level that the target most likely chooses, from the logits there."""
        greedy = self._all_greedy or all(row.node.params.is_greedy for row, _ in level)
        return self._likeliest(logits, None if greedy else self._nodes(level))

    def _nodes(self, level: Level) -> list[Node]:
        """The places where the target chooses the tokens after the nodes of a level."""
        nodes = list[Node]()
        for row, expansions in level:
            first, depth, tree = row.node, row.tree.num_levels, row.tree
            if first.params.reads_path:
                nodes += [behind(first, depth, tree.path(node)) for node, _ in expansions]
            else:
                nodes += [behind(first, depth)] * len(expansions)
        return nodes

    def _likeliest(self, logits: torch.Tensor, nodes: Seq[Node] | None) -> Choices:
        """The tokens that the target most likely chooses at each node, from ``logits [n, draft_vocab_size]``.

        Where all nodes are greedy (``None``), only the drafter's own columns are looked at. Others need all of the
        target's tokens, as noise, penalties and biases are for those: the tokens of no column are impossible there.
        """
        width, temperature = min(self.shape.width, logits.shape[1]), self.shape.temperature
        if nodes is None:
            columns, log_probs = top_tokens(logits, width, temperature)
            if self.target_ids is not None:
                ids = self._ids
                columns = [list(map(ids.__getitem__, row)) for row in columns]
            return columns, log_probs
        if self.target_ids is None:
            return top_choices(logits, nodes, width, temperature)
        wide = logits.new_full((len(logits), self._vocab_size), -math.inf)
        wide[:, self.target_ids] = logits
        return top_choices(wide, nodes, width, temperature)

    @cached_property
    def _ids(self) -> list[int]:
        assert self.target_ids is not None
        return to_host(self.target_ids)

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

    def _first_level(self, rows: Seq[GrowingRow]) -> Level:
        return [(row, self.shape.expand(row.tree, row.tree.level)) for row in rows]

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


def nodes_of(level: Level) -> list[tuple[GrowingRow, int]]:
    """The nodes of a level, in the order in which they are computed."""
    return [(row, node) for row, expansions in level for node, _ in expansions]


def pack_level(level: Level) -> PackedInputs:
    """The step that computes the nodes of a level."""
    return pack_nodes(
        [row.request_id for row, _ in level],
        torch.tensor([row.tree.token_ids[node] for row, node in nodes_of(level)]),
        [len(expansions) for _, expansions in level],
        [row.tree.num_tokens + len(row.tree.cached) for row, _ in level],
        [row.tree.cached_parents for row, _ in level],
    )


class SlotDrafter(LevelDrafter):
    """Drafts with one pass for all levels: what follows a node depends on its level, and not on the tokens before.

    Its logits have a slot for each level of a row. On a GPU the host waits once a draft, or twice in a batch of greedy
    and sampled rows; once more for each level if a row has penalties, which read what was drafted before.
    """

    caches_nodes = False

    def grow_at_once(self, rows: Seq[GrowingRow]) -> bool:
        return False  # one pass is all there is

    @abstractmethod
    def slots(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        """The logits ``[sum(depths), draft_vocab_size]`` of all levels of the rows' trees, row after row."""

    def tree_of(self, row: Row, num_nodes: int, depth: int) -> GrowingTree | None:
        tree = super().tree_of(row, num_nodes, depth)  # type: ignore[safe-super]  # of a sibling class
        if tree is not None:
            tree.depth = min(tree.depth, 1 + tree.max_cached)
        return tree

    def most_cached(self, num_nodes: int, depth: int) -> int:
        """A mask for each level but the first."""
        return depth - 1

    def catch_up(self, rows: Seq[GrowingRow]) -> torch.Tensor:
        self._logits, self._starts, start = self.slots(rows), dict[str, int](), 0
        for row in rows:
            self._starts[row.request_id] = start
            start += row.tree.depth
        self._known: Choices | None = None
        if not any(row.node.params.reads_path for row in rows):
            nodes = [behind(row.node, depth) for row in rows for depth in range(row.tree.depth)]
            greedy = all(row.node.params.is_greedy for row in rows)
            self._known = self._likeliest(self._logits, None if greedy else nodes)
        return self.compute([(row, [(-1, ())]) for row in rows])

    def compute(self, level: Level) -> torch.Tensor:
        if self._known is not None and self._goes_on is None:
            return self._logits  # nobody reads them
        return self._logits[on_device(self._slots_at(level), self._logits.device)]

    def choices(self, level: Level, logits: torch.Tensor) -> Choices:
        if self._known is None:
            return super().choices(level, logits)
        tokens, log_probs = self._known
        places = self._slots_at(level)
        return [tokens[place] for place in places], [log_probs[place] for place in places]

    def _slots_at(self, level: Level) -> list[int]:
        return [self._starts[row.request_id] + row.tree.num_levels for row, expansions in level for _ in expansions]
