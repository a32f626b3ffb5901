"""The replay drafter: a known continuation, spoiled where coins say that the drafter was wrong."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate, islice
from operator import mul
from pathlib import Path
from zlib import crc32

import msgspec
import numpy as np

from emssd.data import read_json, typed
from emssd.drafting import Draft, Drafter
from emssd.errors import ConfigError
from emssd.model import counted_on
from emssd.sequences import Batch, Row
from emssd_lab.replay import ReplayConfig

__all__ = ["UNKNOWN", "ReplayDrafter"]

UNKNOWN = (
    "drafter=replay cannot know what this model will generate; give drafter.known=generations.jsonl, of a run of the "
    "same prompts with drafter=none, or a model of model.architecture"
)
"""The error for a model whose text is not known."""

_Path = tuple[tuple[int, ...], float]  # the ranks from the root on, and how likely all of them are right
_MOST_NODES = 4096
_POSITIONS = 1024  # of each request that have coins of their own; after them the coins begin again


class ReplayDrafter(Drafter):
    """Drafts what the target is going to generate, with wrong tokens where coins say so.

    A coin per output position says which rank is right there, or none; a chain is a tree of one rank. The coins depend
    on the request id alone, so trees of all shapes, all budgets, batch sizes and backends see the same text. The
    acceptance length of a chain follows the paper's law (Equation 6).

    Attributes:
        nodes: depth from 1, rank among siblings from 0, and parent of each node, the likeliest first. The chances
            along a path are multiplied (SpecInfer's expansion, Miao et al. 2023, §3).
        must_count: whether only its architecture tells the output of the target; see `counted_on`.

    Raises:
        ConfigError: options that contradict each other, or no file of known outputs.
    """

    def __init__(self, config: ReplayConfig, vocab_size: int) -> None:
        self._config, self._vocab_size = config, vocab_size
        _check(config)
        branches = config.branches or [1] * config.num_speculative_tokens
        chances = config.chances or [[config.p]]
        self.nodes = _nodes(branches, chances)
        self.num_speculative_tokens, self.drafts_trees = len(self.nodes), bool(config.branches)
        self._depth, self._widest = len(branches), max(branches, default=1)
        self._known = None if config.known is None else _read_known(Path(config.known).expanduser())
        self.must_count = self._known is None and any(map(any, chances))
        self.replays = _described(config)
        self._drawn: dict[str, tuple[list[list[int]], list[bool]]] = {}  # by request id, see `_draw`

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        trees = [self._tree(row, limit) if limit else [] for row, limit in zip(batch, budget, strict=True)]
        if not self.drafts_trees:
            return Draft.from_chains([token for token, _ in tree] for tree in trees)
        return Draft.from_trees(trees).shallow([max(0, row.num_remaining - 1) for row in batch])

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._drawn.pop(request_id, None)

    def right(self, request_id: str, position: int) -> list[int]:
        """By depth, from 1, the rank that is right after `position` new tokens; empty where there is no draft.

        A rank that no node has: all nodes of this depth are wrong.
        """
        if request_id not in self._drawn:
            self._drawn[request_id] = self._draw(request_id)
        ranks, is_drafted = self._drawn[request_id]
        if not is_drafted[position % _POSITIONS]:
            return []
        return [ranks[min(depth, len(ranks) - 1)][(position + depth) % _POSITIONS] for depth in range(self._depth)]

    def _draw(self, request_id: str) -> tuple[list[list[int]], list[bool]]:
        """Draw the ranks that are right, ``[depths][positions]``, and the positions that have a draft, ``[positions]``.

        The last depth holds for deeper ones.
        """
        random, p, spread = (
            np.random.default_rng(crc32(request_id.encode())),
            self._config.p,
            self._config.concentration,
        )
        if spread is not None:
            p = random.beta(p * spread, (1 - p) * spread)
        coins, places = random.random((2, _POSITIONS))
        bounds = [np.cumsum(np.pad(level, (0, self._widest))) for level in self._config.chances or [[p]]]
        ranks = [np.searchsorted(bound, coins, side="right").tolist() for bound in bounds]
        return ranks, (places < self._config.coverage).tolist()

    def _tree(self, row: Row, limit: int) -> list[tuple[int, int]]:
        """Token and parent of the first nodes."""
        position = len(row.output_ids)
        right, tokens = self.right(row.request_id, position), self._upcoming(row, position, self._depth)
        return [
            (tokens[depth - 1] if right[depth - 1] == rank else self._wrong(tokens[depth - 1], rank), parent)
            for depth, rank, parent in islice(self.nodes, limit if right else 0)
        ]

    def _upcoming(self, row: Row, position: int, count: int) -> list[int]:
        """The next `count` tokens of the target; where the known ones end, rows end too, and any will do."""
        if self._known is None:
            if self.must_count and position and counted_on(row.tokens[-2], 1, self._vocab_size) != row.tokens[-1:]:
                raise ConfigError(UNKNOWN)
            return counted_on(row.tokens[-1], count, self._vocab_size)
        if row.request_id not in self._known:
            raise ConfigError(f"drafter.known has no row {row.request_id!r}; make it from a run of the same prompts")
        tokens = self._known[row.request_id][position : position + count]
        return tokens + [0] * (count - len(tokens))

    def _wrong(self, token: int, rank: int) -> int:
        """Another token, and one for each rank."""
        return (token + 1 + (self._vocab_size // 2 - 1 + rank) % (self._vocab_size - 1)) % self._vocab_size


def _check(config: ReplayConfig) -> None:
    if max(config.num_speculative_tokens, sum(accumulate(config.branches, mul))) > _MOST_NODES:
        raise ConfigError(
            f"drafter.branches is {config.branches} and drafter.num_speculative_tokens "
            f"{config.num_speculative_tokens}; give at most {_MOST_NODES} nodes in all"
        )
    if any(sum(level) > 1 + 1e-9 for level in config.chances):
        raise ConfigError(
            f"drafter.chances is {config.chances}; give for each depth a list of chances by rank, which add up to 1 at "
            f"most"
        )
    if config.concentration is not None and (config.chances or not 0 < config.p < 1):
        raise ConfigError(
            f"drafter.concentration spreads drafter.p, which is {config.p}, over requests; give a p between 0 and 1 "
            f"without drafter.chances, or leave out drafter.concentration"
        )


def _nodes(branches: Seq[int], chances: Seq[Seq[float]]) -> list[tuple[int, int, int]]:
    """Depth, rank and parent of each node of a tree, the likeliest first."""
    level, paths = list[_Path]([((), 1.0)]), list[_Path]()
    for depth, width in enumerate(branches):
        shares = [*chances[min(depth, len(chances) - 1)], *[0.0] * width]
        level = [((*path, rank), worth * shares[rank]) for path, worth in level for rank in range(width)]
        paths += level
    ordered = [path for path, _ in sorted(paths, key=lambda pair: -pair[1])]  # stable: parents before children
    numbers = {path: number for number, path in enumerate(ordered)}
    return [(len(path), path[-1], numbers.get(path[:-1], -1)) for path in ordered]


def _described(config: ReplayConfig) -> str:
    """The source of the drafts, in words."""
    spread = "" if config.concentration is None else f" (Beta of each request, {config.concentration:g})"
    by_chance = "" if config.p else " (right by chance at most)"
    law = f"{config.chances} by depth and rank" if config.chances else f"p = {config.p:g}{spread}{by_chance}"
    trees = f"trees of {' × '.join(map(str, config.branches))}"
    shape = trees if config.branches else f"{config.num_speculative_tokens} drafted"
    where = "" if config.coverage == 1 else f" at {config.coverage:.0%} of positions"
    return f"acceptance drawn: {law}, {shape}{where}"


class _Known(msgspec.Struct):
    id: str
    token_ids: list[int]


def _read_known(path: Path) -> dict[str, list[int]]:
    """By request id the tokens of an earlier run's ``generations.jsonl``."""
    try:
        rows = [typed(read_json(line), _Known) for line in path.read_bytes().split(b"\n") if line]
        return {row.id: row.token_ids for row in rows}
    except OSError as error:
        raise ConfigError(
            f"drafter.known={path} cannot be read: {error.strerror}; give the generations.jsonl of a run with "
            f"drafter=none"
        ) from error
    except ValueError as error:
        raise ConfigError(f"drafter.known={path} is no generations.jsonl ({error})") from error
