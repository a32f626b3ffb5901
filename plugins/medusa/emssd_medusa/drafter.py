"""Drafts with Medusa heads for the whole batch at once: combinations of what each head finds likely, or chains.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", arXiv 2401.10774.
Its typical acceptance (§3.3) is not used, as it changes what is generated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from emssd.attention.transfer import on_device
from emssd.decoding.choosing import first_node
from emssd.drafting import Draft, Drafter, DrafterContext, Outcome
from emssd.drafting.growth import Tree, grow_tree, joined_trees
from emssd.heads import LAST_NORMED, KnownStates, Way
from emssd.heads.as_bytes import keep_bytes
from emssd.heads.choices import head_choices
from emssd.heads.lent import Lent
from emssd.heads.options import head_path
from emssd.sampling.choice import Node
from emssd.sampling.draws import behind
from emssd.sequences import Batch
from emssd_medusa import MedusaConfig
from emssd_medusa.candidates import Candidates, candidates_of, check_options
from emssd_medusa.heads import MedusaHeads
from emssd_medusa.loading import load_medusa

__all__ = ["MedusaDrafter"]

logger = logging.getLogger("emssd")

Path = tuple[int, ...]
"""Tokens behind a row's newest one."""

_NEWEST: tuple[Way, Path] = ((), ())
"""How a row's newest token is reached."""


@dataclass(slots=True, eq=False)
class _Row:
    """A row that is drafted for.

    Attributes:
        place: among the rows that are.
        state: ``[1, hidden]`` that the target chose its newest token from.
        node: where the target chooses the token behind that.
        num_nodes, depth: the most of its tree.
        known: by `key`, the likeliest tokens and their probabilities.
        tree: its draft, as far as choices are known.
    """

    request_id: str
    place: int
    state: torch.Tensor
    node: Node
    num_nodes: int
    depth: int
    known: dict[Hashable, list[tuple[int, float]]] = field(default_factory=dict)
    tree: Tree = field(default_factory=lambda: Tree([], [], []))

    @property
    def num_levels_at_once(self) -> int:
        """Levels whose choices can be asked for before there is a tree, with any tokens in the place of its paths."""
        return 1 if self.node.params.reads_prefix else self.depth

    def key(self, path: Path) -> Hashable:
        """What the choice behind `path` depends on: its length alone, unless penalties read its tokens."""
        return path if self.node.params.reads_prefix else len(path)

    def grow(self, candidates: Candidates) -> list[Path]:
        """Make the tree of what is known. Returns those paths in it that it is not known for what follows them."""
        missing = list[Path]()

        def children(state: tuple[Way, Path]) -> list[tuple[int, float, tuple[Way, Path]]]:
            way, path = state
            ranks = candidates.ranks(way)
            if not ranks:
                return []
            if (known := self.known.get(self.key(path))) is None:
                missing.append(path)
                return []
            likely = ((rank, *known[rank]) for rank in ranks if rank < len(known))
            return [(token, chance, ((*way, rank), (*path, token))) for rank, token, chance in likely]

        self.tree = grow_tree(_NEWEST, children, num_nodes=self.num_nodes, depth=self.depth, branches=self.num_nodes)
        return missing


class MedusaDrafter(Drafter):
    """Drafts with heads that have no KV cache and read nothing but a hidden state.

    All heads guess from the target's last hidden state of the token before the newest one: the target chose the newest
    token from it. The head at 0 guesses the token behind the newest one, the first that is drafted. No head knows what
    the others guess. So what follows a node depends on its level, and not on its way there.

    A row is drafted for once the target has computed all of its tokens but the newest, so not in its first step. On a
    GPU the host waits once a step, twice in a batch of greedy and sampled rows. Where penalties read drafted tokens, it
    waits once more for each level.

    Args:
        heads: with their weights.
        candidates: of the trees; with a `width` of 1 they are chains.
        vocab_size: of the target.
    """

    hidden_layers = (LAST_NORMED,)

    def __init__(self, heads: MedusaHeads, candidates: Candidates, vocab_size: int) -> None:
        self.num_speculative_tokens, self.drafts_trees = candidates.num_nodes, candidates.width > 1
        self._heads, self._candidates, self._vocab_size = heads, candidates, vocab_size
        self._states: dict[str, KnownStates] = {}

    @classmethod
    def load(cls, config: MedusaConfig, context: DrafterContext) -> MedusaDrafter:
        """Load the heads of `config`.

        Raises:
            ConfigError: an option cannot work, or there are no such heads for this target.
            OutOfMemoryError: the target's device has no room for them.
        """
        check_options(config)
        path, lent = head_path(config.path, "medusa"), Lent.by(context, "medusa")
        loaded = load_medusa(path, lent.sizes, dtype=lent.target.dtype, device=lent.target.device)
        for line in loaded.described:
            logger.info("drafter=medusa: %s", line)
        if lent.compile:
            keep_bytes(loaded.heads)
        return cls(loaded.heads, candidates_of(config, len(loaded.heads.heads)), context.vocab_size)

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        rows = self._begin(batch, budget)
        if not rows:
            return Draft.empty(len(batch))
        num_heads = max(row.depth for row in rows)
        logits = self._heads(torch.cat([row.state for row in rows]), num_heads).flatten(0, 1)
        asked = [(row, (0,) * level) for level in range(num_heads) for row in rows if level < row.num_levels_at_once]
        while asked:
            self._choose(logits, len(rows), asked)
            asked = [
                (row, path) for row in dict.fromkeys(row for row, _ in asked) for path in row.grow(self._candidates)
            ]
        trees = {row.request_id: row.tree for row in rows}
        draft = joined_trees(trees.get(row.request_id, Tree([], [], [])) for row in batch)
        return draft if self.drafts_trees else replace(draft, parents=None)

    def observe(self, outcome: Outcome) -> None:
        """Keep the hidden state of each row's last token that the target has computed."""
        if (hidden := outcome.hidden) is None:
            return
        for name, start, (states,) in hidden.rows():
            known = self._states.setdefault(name, KnownStates())
            known.add(start, states)
            known.used(known.stop)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._states.pop(request_id, None)

    def _begin(self, batch: Batch, budget: Seq[int]) -> list[_Row]:
        """The rows that may and can draft."""
        rows, most = list[_Row](), self._candidates
        for row, limit in zip(batch, budget, strict=True):
            num_computed, states = len(row.tokens) - 1, self._states.get(row.request_id)
            num_nodes, depth = min(limit, most.num_nodes), min(most.depth, row.num_remaining - 1)
            if states is not None and states.covers(num_computed) and min(num_nodes, depth) > 0:
                state = states.new(num_computed)
                rows.append(_Row(row.request_id, len(rows), state, first_node(row), num_nodes, depth))
        return rows

    def _choose(self, logits: torch.Tensor, num_rows: int, asked: Seq[tuple[_Row, Path]]) -> None:
        """Tell rows the likeliest tokens behind each of the paths that are `asked` for.

        Args:
            logits: ``[num_heads * num_rows, draft_vocab_size]``, those of one head after those of another.
            num_rows: that are drafted for.
            asked: rows and paths.
        """
        places = [len(path) * num_rows + row.place for row, path in asked]
        own = logits if places == list(range(len(logits))) else logits[on_device(places, logits.device)]
        nodes = [behind(row.node, len(path), path) for row, path in asked]
        tokens, log_probs = head_choices(own, nodes, self._candidates.width, self._heads.target_ids, self._vocab_size)
        for (row, path), likely, chances in zip(asked, tokens, log_probs, strict=True):
            row.known[row.key(path)] = list(zip(likely, map(math.exp, chances), strict=True))
