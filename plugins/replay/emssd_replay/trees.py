"""Replayed token trees: a known continuation among wrong children, as often as chances by depth and rank say."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from emssd.drafting import Draft
from emssd.errors import ConfigError
from emssd.sequences import Batch, Row
from emssd.simulate import TreeLaw
from emssd_replay import ReplayConfig
from emssd_replay.drafter import ReplayDrafter

__all__ = ["ReplayTrees"]


class ReplayTrees(ReplayDrafter):
    """Drafts trees of one shape; a request's coins depend on its id and its position alone.

    Args:
        config: see `ReplayConfig`; it has branches.

    Raises:
        ConfigError: impossible branches or chances, or options of chains beside them.
    """

    drafts_trees = True

    def __init__(self, config: ReplayConfig, vocab_size: int) -> None:
        if config.trace is not None or config.concentration is not None or config.coverage != 1:
            raise ConfigError(
                "drafter.branches replays trees, whose acceptance drafter.chances says; leave out drafter.trace, "
                "drafter.concentration and drafter.coverage"
            )
        chances = config.chances or [[config.p]]
        self._law = TreeLaw(config.branches, chances, config.seed)
        super().__init__(replace(config, num_speculative_tokens=0), vocab_size)
        self.num_speculative_tokens = len(self._law.parents)
        self.must_count = self._known is None and any(map(any, chances))
        shape = " × ".join(map(str, config.branches))
        self.replays = f"acceptance drawn: trees of {shape}, right by depth and rank with {chances}"

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        draft = Draft.from_trees(self._tree(row, limit) for row, limit in zip(batch, budget, strict=True))
        return draft.shallow([max(0, row.num_remaining - 1) for row in batch])

    def _tree(self, row: Row, limit: int) -> list[tuple[int, int]]:
        law, position = self._law, len(row.tokens) - len(row.request.prompt_ids)
        upcoming = self._upcoming(row, position, max(law.depths))
        right = law.right(row.request_id, position)[:limit]
        nodes = zip(law.depths, law.ranks, right, law.parents, strict=False)
        return [
            (upcoming[depth - 1] if is_right else self._wrong(upcoming[depth - 1], rank), parent)
            for depth, rank, is_right, parent in nodes
        ]

    def _wrong(self, token: int, rank: int) -> int:
        """Another token, and one for each rank."""
        return (token + 1 + (self._vocab_size // 2 + rank) % (self._vocab_size - 1)) % self._vocab_size
