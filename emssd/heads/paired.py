"""`PairedDrafter`: an EAGLE head drafts for the whole batch at once, trees that grow level by level, or chains.

Li et al. 2024, EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858, §4; 2025, EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from emssd.attention import Kept, PackedInputs
from emssd.attention.transfer import on_device
from emssd.decoding.choosing import first_node
from emssd.decoding.packing import pack_nodes
from emssd.decoding.top_tokens import likelihood
from emssd.drafting import Draft, Drafter, GoesOn, HiddenStates, Outcome
from emssd.drafting.levels import GrowingTree, going_on, joined_best, with_room
from emssd.drafting.shapes import DynamicShape, Expansion, Shape
from emssd.heads.choices import head_choices
from emssd.heads.lent import Lent
from emssd.heads.pairs import PairedHead
from emssd.heads.runner import HeadRunner
from emssd.heads.states import KnownStates
from emssd.model.program import Chain
from emssd.sampling.choice import Node
from emssd.sampling.draws import behind
from emssd.sequences import Batch

__all__ = ["Level", "Outputs", "PairedDrafter", "PairedRow", "nodes_of"]


@dataclass(frozen=True, slots=True)
class PairedRow:
    """A row that is drafted for.

    Attributes:
        pairs: its features.
        tree: that grows behind its pairs, as its newest token is the second half of the last one.
        node: where the target chooses the token behind the newest one.
    """

    request_id: str
    tokens: Seq[int]
    pairs: KnownStates
    tree: GrowingTree
    node: Node


_MOST_ARRIVED, _MOST_WAITING = 1024, 256  # tokens of all rows, and of one

Level = list[tuple[PairedRow, list[Expansion]]]
"""What is expanded in one pass: nodes of each row."""

Outputs = tuple[torch.Tensor, torch.Tensor]
"""Of a pass, hidden states ``[R, hidden]`` and logits ``[R, draft_vocab_size]`` behind its ``logit_rows``."""


class PairedDrafter(Drafter):
    """Drafts with a head that reads pairs, see `PairedHead`, and has a KV cache of its own.

    A row of `n` tokens has ``n - 1`` pairs, and the output behind the last is for the first drafted token. A node of
    the tree is paired with the head's own output behind its parent. When a draft is done, the KV of its nodes is
    dropped: the next draft computes those that were accepted from the target's hidden states.

    A row is drafted for once the target has computed all of its tokens but the newest, so not in its first step. On a
    GPU the host waits once a level, for the likeliest tokens behind each node; twice in a batch of greedy and sampled
    rows.

    Args:
        head: with its weights.
        layers: the target's hidden states that it reads, in this order.
        shape: of the trees; one child for each node makes chains.
        lent: what it borrows.
    """

    def __init__(self, head: PairedHead, layers: Seq[int], shape: Shape, lent: Lent) -> None:
        self.hidden_layers, self.drafts_trees = tuple(layers), shape.width > 1
        self.num_speculative_tokens = shape.num_nodes
        spec = replace(head.kv_cache_spec(lent.spec), trees=self.drafts_trees)
        self._head, self._max_len = head, spec.max_model_len
        self._runner = HeadRunner(head, lent.make_cache(spec), compile=lent.compile)
        self._target, self._shape = lent.target, shape
        self._pairs: dict[str, KnownStates] = {}
        # As long as nothing is drafted, hidden states are laid aside: first as they come, then, row by row, with the
        # position of the first. Features of many at once cost less, and none those of rows that are never drafted for.
        self._arrived: list[HiddenStates] = []
        self._num_arrived = 0  # tokens
        self._waiting: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self._goes_on: GoesOn | None = None

    def end_by(self, goes_on: GoesOn | None) -> None:
        self._goes_on = goes_on

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        if not any(budget):
            return Draft.empty(len(batch))
        self._sort_arrived()
        self._make_features([row.request_id for row, limit in zip(batch, budget, strict=True) if limit])
        rows = self._begin(batch, budget)
        if not rows:
            return Draft.empty(len(batch))
        if not self._grow_chains(rows):
            self._grow_trees(rows)
        self._runner.commit(Kept(tuple(row.request_id for row in rows), tuple(row.pairs.num_used for row in rows)))
        trees = {row.request_id: row.tree for row in rows}
        return joined_best([trees.get(row.request_id) for row in batch], chains=not self.drafts_trees)

    def observe(self, outcome: Outcome) -> None:
        """Keep the hidden states of all tokens that the target has computed."""
        if (hidden := outcome.hidden) is None:
            return
        self._arrived.append(hidden)
        self._num_arrived += hidden.indptr[-1]
        if self._num_arrived > _MOST_ARRIVED:
            self._sort_arrived()
            waiting = {name: sum(len(own) for _, own in pieces) for name, pieces in self._waiting.items()}
            self._make_features([name for name, number in waiting.items() if number > _MOST_WAITING])

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self._sort_arrived()  # later rows may have the same ids
        self._runner.release(request_ids)
        for request_id in request_ids:
            self._pairs.pop(request_id, None)
            self._waiting.pop(request_id, None)

    def _sort_arrived(self) -> None:
        """Lay aside row by row what arrived."""
        for hidden in self._arrived:
            joined = torch.cat(hidden.states, dim=-1)
            for name, start, (own,) in replace(hidden, layers=(0,), states=(joined,)).rows():
                self._waiting.setdefault(name, []).append((start, own))
        self._arrived, self._num_arrived = [], 0

    def _make_features(self, request_ids: Iterable[str]) -> None:
        """Make features of the hidden states of some rows that wait for that."""
        waiting = [(name, *piece) for name in request_ids for piece in self._waiting.pop(name, ())]
        if not waiting:
            return
        features = self._features(torch.cat([own for *_, own in waiting]))
        pieces = torch.split(features, [len(own) for *_, own in waiting])
        for (name, start, _), own in zip(waiting, pieces, strict=True):
            self._pairs.setdefault(name, KnownStates()).add(start, own)

    def _features(self, hidden: torch.Tensor) -> torch.Tensor:
        """The features ``[n, hidden]`` of tokens, from ``hidden [n, states * target_hidden]``, side by side."""
        return self._head.features(hidden)

    def _begin(self, batch: Batch, budget: Seq[int]) -> list[PairedRow]:
        """The rows that may and can draft, each with a tree without nodes."""
        rows = list[PairedRow]()
        for row, limit in zip(batch, budget, strict=True):
            num_pairs, pairs = len(row.tokens) - 1, self._pairs.get(row.request_id)
            reach = self._max_len - num_pairs
            num_nodes, depth = min(limit, self._shape.num_nodes), min(self._shape.depth, row.num_remaining - 1)
            if pairs is None or not pairs.covers(num_pairs) or min(num_nodes, depth) < 1 or reach < 0:
                continue
            most_cached = min(self._shape.most_cached(num_nodes, depth), reach)
            tree = GrowingTree(num_pairs, num_nodes, depth, most_cached)
            rows.append(PairedRow(row.request_id, row.tokens, pairs, tree, first_node(row)))
        held = {name: pairs.num_used for name, pairs in self._pairs.items() if pairs.num_used}
        wanted = [(row.request_id, row.tree.num_tokens + row.tree.max_cached) for row in rows]
        fitting = with_room(self._runner.fits, held, wanted)
        return [row for row, fits in zip(rows, fitting, strict=True) if fits]

    def _grow_trees(self, rows: Seq[PairedRow]) -> None:
        """Draft level by level."""
        level = [(row, self._shape.expand(row.tree, [-1])) for row in rows]
        hidden, logits = self._catch_up(rows)
        self._grow(level, logits)
        while following := self._next_level(self._going_on(level, logits)):
            hidden, logits = self._compute(following, level, hidden)
            level = following
            self._grow(level, logits)

    def _grow_chains(self, rows: Seq[PairedRow]) -> bool:
        """Draft all levels in one call, if these are greedy chains and the head can; returns whether it did."""
        shape, table = self._shape, self._head.table(self._target.table)
        if (
            table is None
            or self._goes_on is not None
            or not (isinstance(shape, DynamicShape) and shape.width == 1)
            or not all(row.node.params.is_greedy for row in rows)
        ):
            return False
        lengths = [min(row.tree.num_nodes, row.tree.depth, row.tree.max_cached + 1) for row in rows]
        chain = Chain(
            lengths, self._target.vocab_size, table, self._head.target_ids, 1.0 / shape.temperature, shape.least
        )
        found = self._runner.run_chain(*self._new_pairs(rows), chain)
        if found is None:
            return False
        self._have_used(rows)
        for row, length, tokens, log_probs in zip(rows, lengths, *(each.tolist() for each in found), strict=True):
            node, row.tree.level = -1, []
            for token, share in zip(tokens[:length], log_probs, strict=False):
                log_prob = likelihood(share)
                row.tree.grow(node, (0,), [token], [log_prob])
                if log_prob < shape.least:
                    break
                node += 1
        return True

    def _catch_up(self, rows: Seq[PairedRow]) -> Outputs:
        """Compute all pairs that are not cached. Returns the outputs behind the last of each row."""
        packed, inputs = self._new_pairs(rows)
        outputs = self._run_on(packed, inputs)
        self._have_used(rows)
        return outputs

    def _new_pairs(self, rows: Seq[PairedRow]) -> tuple[PackedInputs, torch.Tensor]:
        """The step of all pairs that are not cached, with the last of each row wanted, and its inputs."""
        features = [row.pairs.new(row.tree.num_tokens) for row in rows]
        lengths, token_ids = [len(new) for new in features], list[int]()
        for row, length in zip(rows, lengths, strict=True):
            token_ids += row.tokens[-length:]  # token i + 1 stands beside the feature of token i
        packed = pack_nodes(
            [row.request_id for row in rows], torch.tensor(token_ids), lengths, [row.tree.num_tokens for row in rows]
        )
        packed = replace(packed, logit_rows=torch.tensor(packed.qo_indptr[1:]) - 1)
        return packed, self._inputs(packed, torch.cat(features))

    def _have_used(self, rows: Seq[PairedRow]) -> None:
        """Note that all pairs of some rows are computed."""
        for row in rows:
            row.pairs.used(row.tree.num_tokens)

    def _going_on(self, level: Level, logits: torch.Tensor) -> list[PairedRow]:
        """The rows of a level that are drafted further, once it has grown from ``logits [n, draft_vocab_size]``."""
        grown = ((row.request_id, row.tree, expansions) for row, expansions in level)
        going = going_on(self._goes_on, grown, logits, self._shape.temperature)
        return [row for row, _ in level if row.request_id in going]

    def _next_level(self, rows: Seq[PairedRow]) -> Level:
        """The rows that are not done, with the nodes to expand."""
        level = []
        for row in rows:
            tree = row.tree
            expansions = self._shape.expand(tree, tree.frontier())[: tree.max_cached - len(tree.cached)]
            if expansions:
                tree.cached.extend(node for node, _ in expansions)
                level.append((row, expansions))
        return level

    def _compute(self, level: Level, before: Level, hidden: torch.Tensor) -> Outputs:
        """Compute the nodes of a level. Returns the outputs behind each.

        Args:
            level: whose nodes are children of nodes of the level before.
            before: that level.
            hidden: behind its nodes.
        """
        places = {(row.request_id, node): place for place, (row, node) in enumerate(nodes_of(before))}
        nodes = list(nodes_of(level))
        packed = pack_nodes(
            [row.request_id for row, _ in level],
            torch.tensor([row.tree.token_ids[node] for row, node in nodes]),
            [len(expansions) for _, expansions in level],
            [row.tree.num_tokens + len(row.tree.cached) for row, _ in level],
            [row.tree.cached_parents() for row, _ in level],
        )
        parents = [places[row.request_id, row.tree.parents[node]] for row, node in nodes]
        return self._run(packed, hidden[on_device(parents, hidden.device)])

    def _run(self, packed: PackedInputs, features: torch.Tensor) -> Outputs:
        """The outputs behind tokens that stand beside ``features [nnz, hidden]``."""
        return self._run_on(packed, self._inputs(packed, features))

    def _inputs(self, packed: PackedInputs, features: torch.Tensor) -> torch.Tensor:
        """What the head reads, ``[nnz, 2 * hidden]``."""
        embeds = self._head.embed(packed.input_ids.to(features.device), self._target.embed)
        return torch.cat([embeds, features], dim=-1)

    def _run_on(self, packed: PackedInputs, inputs: torch.Tensor) -> Outputs:
        return self._runner.run_to_logits(
            packed, inputs, lambda hidden: self._head.logits(hidden, self._target.project)
        )

    def _grow(self, level: Level, logits: torch.Tensor) -> None:
        """Give each node of a level its children, from the head's ``logits [n, draft_vocab_size]`` behind them."""
        paths = [(row.node, row.tree.path(node)) for row, node in nodes_of(level)]
        nodes = [behind(first, len(path), path) for first, path in paths]
        tokens, log_probs = head_choices(
            logits,
            nodes,
            self._shape.width,
            self._head.target_ids,
            self._target.vocab_size,
            self._shape.temperature,
        )
        children = zip(tokens, log_probs, strict=True)
        for row, expansions in level:
            row.tree.level = []
            for node, ranks in expansions:
                row.tree.grow(node, ranks, *next(children))


def nodes_of(level: Level) -> Iterator[tuple[PairedRow, int]]:
    """The nodes of a level, in the order in which they are computed."""
    return ((row, node) for row, expansions in level for node, _ in expansions)
