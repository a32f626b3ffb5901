"""The replay drafters: a known continuation, spoiled where a trace or a law says that the drafter was wrong."""

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
from emssd_lab.replay import ReplayConfig
from emssd_lab.simulate import StageTrace, Trace, TreeLaw, geometric_trace, load_trace

__all__ = ["UNKNOWN", "ReplayDrafter", "ReplayTrees"]

UNKNOWN = (
    "drafter=replay cannot know what this model will generate; give drafter.known=generations.jsonl, of a run of the "
    "same prompts with drafter=none, or a model of model.architecture"
)
"""The error for a model whose text is not known."""

_NUM_DRAWN = 512  # requests whose coins are drawn; further ones share theirs
_DRAWN_TOKENS = 1024  # of each; after them its coins begin again


class ReplayDrafter(Drafter):
    """Drafts what the target is going to generate, with a wrong token where the trace has one.

    A row's trace depends on its request id and on its position alone, so every batch size and backend is shown the
    same drafts. Where the output is given too, the trace has to be of the same requests; else it stands for any.

    Attributes:
        replays: what is replayed, in words.
        must_count: whether nothing but its architecture tells what the target will generate; see `counted_on`.
    """

    def __init__(self, config: ReplayConfig, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._known = None if config.known is None else _read_known(Path(config.known).expanduser())
        if config.trace is not None:
            trace = load_trace(Path(config.trace).expanduser())
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
        length, right = stage.within(limit, position % len(stage.drafted))
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


class ReplayTrees(ReplayDrafter):
    """Drafts trees of one shape; a request's coins depend on its id and its position alone."""

    drafts_trees = True

    def __init__(self, config: ReplayConfig, vocab_size: int) -> None:
        if config.trace is not None or config.concentration is not None or config.coverage != 1:
            raise ConfigError(
                "drafter.branches replays trees, whose acceptance drafter.chances says; leave out drafter.trace, "
                "drafter.concentration and drafter.coverage"
            )
        chances = config.chances or [[config.p]]
        self._law = TreeLaw(config.branches, chances)
        super().__init__(replace(config, num_speculative_tokens=0), vocab_size)
        self.num_speculative_tokens = len(self._law.parents)
        self.must_count = self._known is None and any(map(any, chances))
        shape = " × ".join(map(str, config.branches))
        self.replays = f"acceptance drawn: trees of {shape}, right by depth and rank with {chances}"

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        return self._law.draft(batch, budget, self._upcoming, self._wrong)

    def _wrong(self, token: int, rank: int) -> int:
        """Another token, and one for each rank."""
        return (token + 1 + (self._vocab_size // 2 + rank) % (self._vocab_size - 1)) % self._vocab_size


def _drawn(config: ReplayConfig) -> Trace:
    """The trace of the config's chances; with a `coverage`, drafts stand at that share of its positions only."""
    trace = geometric_trace(
        config.p,
        _NUM_DRAWN,
        num_speculative_tokens=config.num_speculative_tokens,
        max_new_tokens=_DRAWN_TOKENS,
        concentration=config.concentration,
    )
    if config.coverage == 1:
        return trace
    draw, requests = random.Random(0), []
    for request in trace:
        (stage,) = request.stages
        there = [draw.random() < config.coverage for _ in stage.drafted]
        drafted, right = (tuple(map(int.__mul__, counts, there)) for counts in (stage.drafted, stage.right))
        requests.append(replace(request, stages=(StageTrace(drafted, right),)))
    return replace(trace, requests=tuple(requests))


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
