"""Drafts with Hydra heads for the whole batch at once: trees that grow level by level, or chains.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", arXiv 2402.05109.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from emssd.attention import Kept
from emssd.attention.transfer import on_device
from emssd.decoding.choosing import first_node
from emssd.decoding.packing import pack_nodes
from emssd.decoding.top_tokens import top_choices
from emssd.drafting import Draft, Drafter, DrafterContext, GoesOn, Outcome
from emssd.drafting.levels import GrowingTree, going_on, joined_best, with_room
from emssd.drafting.shapes import Expansion, Shape
from emssd.heads import HeadRunner, KnownStates
from emssd.heads.as_bytes import keep_bytes
from emssd.heads.lent import Lent
from emssd.heads.options import head_path
from emssd.model import BorrowedTarget
from emssd.sampling.choice import Node
from emssd.sampling.draws import behind
from emssd.sequences import Batch, Row
from emssd_hydra import HydraConfig
from emssd_hydra.loading import LoadedHydra, load_hydra
from emssd_hydra.shapes import check_options, shape_of

__all__ = ["HydraDrafter"]

logger = logging.getLogger("emssd")


@dataclass(frozen=True, slots=True)
class _Row:
    """A row that is drafted for.

    Attributes:
        place: among the rows that are.
        newest: its newest token.
        num_computed: tokens before that.
        states: their hidden states.
        tree: that grows behind the newest token.
        node: where the target chooses the token behind that.
    """

    request_id: str
    place: int
    newest: int
    num_computed: int
    states: KnownStates
    tree: GrowingTree
    node: Node


Level = list[tuple[_Row, list[Expansion]]]
"""What is expanded in one pass: nodes of each row."""


class HydraDrafter(Drafter):
    """Drafts with heads that read a hidden state, and all tokens on the way from the newest one to a node.

    The hidden state is that of the token before the newest one: the target chose the newest token from it. A prefix
    layer's output there takes its place. The head at 0 reads the newest token too, and gives the first drafted ones.

    A row is drafted for once the target has computed all of its tokens but the newest, so not in its first step. On a
    GPU the host waits once a level, for the likeliest tokens behind each node; twice in a batch of greedy and sampled
    rows.

    Args:
        loaded: the heads, and which hidden state they read.
        runner: of the prefix layer, if there is one; its KV cache takes no trees.
        target: whose embeddings the heads read.
        shape: of the trees; one child for each node makes chains.
        max_len: tokens of the longest row in the cache of the prefix layer.
    """

    def __init__(
        self, loaded: LoadedHydra, runner: HeadRunner | None, target: BorrowedTarget, shape: Shape, max_len: int
    ) -> None:
        self.hidden_layers, self.drafts_trees = (loaded.layer,), shape.width > 1
        self.num_speculative_tokens = shape.num_nodes
        self._heads, self._runner, self._target, self._shape = loaded.heads, runner, target, shape
        self._max_len = max_len
        self._states: dict[str, KnownStates] = {}
        self._goes_on: GoesOn | None = None

    @classmethod
    def load(cls, config: HydraConfig, context: DrafterContext) -> HydraDrafter:
        """Load the heads of `config`.

        Raises:
            ConfigError: an option cannot work, or there are no such heads for this target.
            OutOfMemoryError: the target's device has no room for them.
        """
        check_options(config)
        path, lent = head_path(config.path, "hydra"), Lent.by(context, "hydra")
        target, spec = lent.target, lent.spec
        loaded = load_hydra(path, lent.sizes, target.config, dtype=target.dtype, device=target.device)
        for line in loaded.described:
            logger.info("drafter=hydra: %s", line)
        if lent.compile:
            keep_bytes(loaded.heads)
        shape, runner = shape_of(config, len(loaded.heads.projections)), None
        if loaded.prefix is not None:
            spec = loaded.prefix.kv_cache_spec(replace(spec, trees=False))
            runner = HeadRunner(loaded.prefix, lent.make_cache(spec), compile=lent.compile)
        return cls(loaded, runner, target, shape, spec.max_model_len)

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        rows = self._begin(batch, budget)
        if not rows:
            return Draft.empty(len(batch))
        hidden = self._hidden(rows)
        level = [(row, self._shape.expand(row.tree, [-1])) for row in rows]
        while level:
            logits = self._grow(level, hidden)
            grown = ((row.request_id, row.tree, expansions) for row, expansions in level)
            going = going_on(self._goes_on, grown, logits, self._shape.temperature)
            more = (row for row, _ in level if row.request_id in going)
            found = ((row, self._shape.expand(row.tree, row.tree.frontier())) for row in more)
            level = [(row, expansions) for row, expansions in found if expansions]
        trees = {row.request_id: row.tree for row in rows}
        return joined_best([trees.get(row.request_id) for row in batch], chains=not self.drafts_trees)

    def end_by(self, goes_on: GoesOn | None) -> None:
        self._goes_on = goes_on

    def observe(self, outcome: Outcome) -> None:
        """Keep hidden states of tokens that the target has computed: all for a prefix layer, else each row's last."""
        if (hidden := outcome.hidden) is None:
            return
        for name, start, (states,) in hidden.rows():
            known = self._states.setdefault(name, KnownStates())
            known.add(start, states)
            if self._runner is None:
                known.used(known.stop)

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        if self._runner is not None:
            self._runner.release(request_ids)
        for request_id in request_ids:
            self._states.pop(request_id, None)

    def _begin(self, batch: Batch, budget: Seq[int]) -> list[_Row]:
        """The rows that may and can draft, each with a tree without nodes."""
        able = [
            (row, limit)
            for row, limit in zip(batch, budget, strict=True)
            if min(limit, row.num_remaining - 1) > 0 and self._knows(row)
        ]
        if self._runner is not None:
            held = {name: states.num_used for name, states in self._states.items() if states.num_used}
            wanted = [(row.request_id, len(row.tokens) - 1) for row, _ in able]
            fitting = with_room(self._runner.fits, held, wanted)
            able = [each for each, fits in zip(able, fitting, strict=True) if fits]
        return [self._row(place, row, limit) for place, (row, limit) in enumerate(able)]

    def _knows(self, row: Row) -> bool:
        """Whether the hidden states of all tokens before the newest one are known, and no more than can be cached."""
        num_computed, states = len(row.tokens) - 1, self._states.get(row.request_id)
        return states is not None and states.covers(num_computed) and num_computed <= self._max_len

    def _row(self, place: int, row: Row, limit: int) -> _Row:
        num_nodes, depth = min(limit, self._shape.num_nodes), min(self._shape.depth, row.num_remaining - 1)
        tree = GrowingTree(len(row.tokens), num_nodes, depth, max_cached=0)
        states = self._states[row.request_id]
        return _Row(row.request_id, place, row.tokens[-1], len(row.tokens) - 1, states, tree, first_node(row))

    def _hidden(self, rows: Seq[_Row]) -> torch.Tensor:
        """``[r, hidden]`` what the heads read of each row: a state as it is, or the prefix layer's output there."""
        states = [row.states.new(row.num_computed) for row in rows]
        if self._runner is None:
            return torch.cat(states)
        names, kv_lens = tuple(row.request_id for row in rows), tuple(row.num_computed for row in rows)
        lengths = list(map(len, states))
        packed = pack_nodes(names, torch.zeros(sum(lengths), dtype=torch.int64), lengths, kv_lens)
        packed = replace(packed, logit_rows=torch.tensor(packed.qo_indptr[1:]) - 1)
        hidden = self._runner.run(packed, torch.cat(states))
        self._runner.commit(Kept(names, kv_lens))
        for row in rows:
            row.states.used(row.num_computed)
        return hidden

    def _grow(self, level: Level, hidden: torch.Tensor) -> torch.Tensor:
        """Give each node of a level its children. Returns the logits ``[n, vocab]`` behind each.

        Args:
            level: all its nodes are equally deep.
            hidden: ``[r, hidden]`` of each row.
        """
        paths = [(row, row.tree.path(node)) for row, expansions in level for node, _ in expansions]
        ids = torch.tensor([[row.newest, *path] for row, path in paths])
        embeds = self._target.embed(on_device(ids.flatten(), hidden.device)).view(*ids.shape, -1)
        logits: torch.Tensor = self._heads(hidden[on_device([row.place for row, _ in paths], hidden.device)], embeds)
        nodes = [behind(row.node, len(path), path) for row, path in paths]
        tokens, log_probs = top_choices(logits, nodes, self._shape.width, self._shape.temperature)
        children = zip(tokens, log_probs, strict=True)
        for row, expansions in level:
            row.tree.level = []
            for node, ranks in expansions:
                row.tree.grow(node, ranks, *next(children))
        return logits
