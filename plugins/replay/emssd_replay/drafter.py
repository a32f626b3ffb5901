"""The replay drafter: a known continuation, spoiled where a trace says that the drafter was wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import msgspec

from emssd.data import read_json, typed
from emssd.drafting import Draft, Drafter
from emssd.errors import ConfigError
from emssd.model import counted_on
from emssd.sequences import Batch, Row
from emssd.simulate import RequestTrace, StageTrace, Trace, geometric_trace, load_trace
from emssd_replay import ReplayConfig

__all__ = ["UNKNOWN", "ReplayDrafter"]

UNKNOWN = (
    "drafter=replay cannot know what this model will generate; give drafter.known=generations.jsonl, of a run of the "
    "same prompts with drafter=none, or a model of model.architecture"
)
"""The error for a model whose text is not known."""

_NUM_DRAWN = 512  # requests whose coins are drawn; further ones share theirs
_DRAWN_TOKENS = 1024  # of each; behind them its coins begin again


class ReplayDrafter(Drafter):
    """Drafts what the target is going to generate, with a wrong token where the trace has one.

    A row's trace depends on its request id and on its position alone, so every batch size and backend is shown the
    same drafts. Where the output is given too, the trace has to be of the same requests; else it stands for any.

    Args:
        config: see `ReplayConfig`.

    Attributes:
        replays: what is replayed, in words.
        must_count: whether nothing but its architecture tells what the target will generate; see `counted_on`.

    Raises:
        ConfigError: values outside of their ranges, or files that cannot be read.
    """

    def __init__(self, config: ReplayConfig, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._known = None if config.known is None else _read_known(Path(config.known))
        if config.trace is not None:
            trace = load_trace(Path(config.trace))
            dealt = ", dealt out by request id" if self._known is None else ""
            self.replays = f"acceptance recorded in {Path(config.trace).name}{dealt}"
        else:
            trace = _drawn(config)
            spread = "" if config.concentration is None else f" (Beta of each request, {config.concentration:g})"
            chance = "" if config.p else " (right by chance at most)"
            where = "" if config.coverage == 1 else f" at {config.coverage:.0%} of positions"
            self.replays = (
                f"acceptance drawn: p = {config.p:g}{spread}{chance}, {config.num_speculative_tokens} drafted{where}"
            )
        if len(trace.num_speculative_tokens) != 1:
            raise ConfigError(
                f"trace {config.trace} is of {len(trace.num_speculative_tokens)} drafters in turn, and drafter=replay "
                f"replays one; record it with a single drafter"
            )
        self.num_speculative_tokens = trace.num_speculative_tokens[0]
        self._stages = [request.stages[0] for request in trace]
        self._by_id = {request.request_id: request.stages[0] for request in trace}
        self._deals = config.trace is None or self._known is None
        self.must_count = self._known is None and (config.trace is not None or config.p > 0)

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return Draft.from_chains(self._chain(row, limit) for row, limit in zip(batch, budget, strict=True))

    def _chain(self, row: Row, limit: int) -> list[int]:
        stage, position = self._stage(row.request_id), len(row.tokens) - len(row.request.prompt_ids)
        place = position % len(stage.drafted)
        length = min(limit, stage.drafted[place])
        right = min(length, stage.right[place])
        upcoming = self._upcoming(row, position, length)
        if length > right:  # the first wrong token; what follows it cannot be accepted, whatever it is
            upcoming[right] = (upcoming[right] + self._vocab_size // 2) % self._vocab_size
        return upcoming

    def _stage(self, request_id: str) -> StageTrace:
        """The request's own, or, where the trace stands for any, one that depends on the id."""
        if request_id not in self._by_id and not self._deals:
            raise ConfigError(
                f"drafter.trace has no request {request_id!r}, but {', '.join(list(self._by_id)[:3])}, …; beside "
                f"drafter.known, it must be of the same requests: give them the trace's ids, as with data.id_field"
            )
        return self._by_id.get(request_id) or self._stages[crc32(request_id.encode()) % len(self._stages)]

    def _upcoming(self, row: Row, position: int, length: int) -> list[int]:
        """The next `length` tokens of the target; where the known ones end, rows end too, and any will do."""
        if self._known is None:
            if self.must_count and position and counted_on(row.tokens[-2], 1, self._vocab_size) != row.tokens[-1:]:
                raise ConfigError(UNKNOWN)
            return counted_on(row.tokens[-1], length, self._vocab_size)
        if row.request_id not in self._known:
            raise ConfigError(f"drafter.known has no row {row.request_id!r}; make it from a run of the same prompts")
        tokens = self._known[row.request_id][position : position + length]
        return tokens + [0] * (length - len(tokens))


def _drawn(config: ReplayConfig) -> Trace:
    if not 0 <= config.coverage <= 1:
        raise ConfigError(f"drafter.coverage is {config.coverage}; it is a share, between 0 and 1")
    if config.seed < 0:
        raise ConfigError(f"drafter.seed is {config.seed}; it must be at least 0")
    trace = geometric_trace(
        config.p,
        _NUM_DRAWN,
        num_speculative_tokens=config.num_speculative_tokens,
        max_new_tokens=_DRAWN_TOKENS,
        concentration=config.concentration,
        seed=config.seed,
    )
    if config.coverage == 1:
        return trace
    draw = random.Random(config.seed)
    return replace(trace, requests=tuple(_thinned(request, config.coverage, draw) for request in trace))


def _thinned(request: RequestTrace, coverage: float, draw: random.Random) -> RequestTrace:
    """The request with drafts at a share of its positions only."""
    stage = request.stages[0]
    there = [draw.random() < coverage for _ in stage.drafted]
    drafted = tuple(count if kept else 0 for count, kept in zip(stage.drafted, there, strict=True))
    right = tuple(count if kept else 0 for count, kept in zip(stage.right, there, strict=True))
    return replace(request, stages=(StageTrace(drafted, right),))


class _Known(msgspec.Struct):
    id: str
    token_ids: list[int]


def _read_known(path: Path) -> dict[str, list[int]]:
    """By request id the tokens of an earlier run's ``generations.jsonl``."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # and at nothing else that Unicode calls a line's end
        rows = [typed(read_json(line), _Known) for line in lines if line]
        return {row.id: row.token_ids for row in rows}
    except OSError as error:
        raise ConfigError(
            f"drafter.known={path} cannot be read: {error.strerror}; give the generations.jsonl of a run with "
            f"drafter=none"
        ) from error
    except ValueError as error:
        raise ConfigError(f"drafter.known={path} is no generations.jsonl ({error})") from error
