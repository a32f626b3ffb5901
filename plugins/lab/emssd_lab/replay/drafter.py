"""The replay drafter: a known continuation, spoiled where a trace or a law says that the drafter was wrong."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import msgspec

from emssd.data import read_json, typed
from emssd.errors import ConfigError
from emssd.model import counted_on
from emssd.sequences import Row
from emssd_lab.replay import ReplayConfig
from emssd_lab.simulate import StageTrace, TreeLaw, geometric_trace, load_trace
from emssd_lab.simulate.trace_drafter import TraceDrafter

__all__ = ["UNKNOWN", "ReplayDrafter"]

UNKNOWN = (
    "drafter=replay cannot know what this model will generate; give drafter.known=generations.jsonl, of a run of the "
    "same prompts with drafter=none, or a model of model.architecture"
)
"""The error for a model whose text is not known."""

_NUM_DRAWN = 512  # requests whose coins are drawn; further ones share theirs
_DRAWN_TOKENS = 1024  # of each; after them its coins begin again


class ReplayDrafter(TraceDrafter):
    """Drafts what the target is going to generate, with a wrong token where the trace has one.

    A row's trace depends on its request id and on its position alone, so every batch size and backend is shown the
    same drafts. With known outputs, the trace has to be of the same requests; else it stands for any.

    Attributes:
        replays: the source of the drafts, in words.
        must_count: whether only its architecture tells the output of the target; see `counted_on`.
    """

    def __init__(self, config: ReplayConfig, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        law, chances = None, config.chances or [[config.p]]
        if config.branches:
            if config.trace is not None or config.concentration is not None or config.coverage != 1:
                raise ConfigError(
                    "drafter.branches replays trees, whose acceptance drafter.chances says; leave out drafter.trace, "
                    "drafter.concentration and drafter.coverage"
                )
            law = TreeLaw(config.branches, chances)
        self._known = None if config.known is None else _read_known(Path(config.known).expanduser())
        if config.trace is not None:
            trace = load_trace(Path(config.trace).expanduser())
            dealt = ", dealt out by request id" if self._known is None else ""
            self.replays = f"acceptance recorded in {Path(config.trace).name}{dealt}"
        else:
            trace = geometric_trace(
                config.p, _NUM_DRAWN, num_speculative_tokens=config.num_speculative_tokens,
                max_new_tokens=_DRAWN_TOKENS, concentration=config.concentration, coverage=config.coverage,
            )  # fmt: skip
            spread = "" if config.concentration is None else f" (Beta of each request, {config.concentration:g})"
            chance = "" if config.p else " (right by chance at most)"
            where = "" if config.coverage == 1 else f" at {config.coverage:.0%} of positions"
            self.replays = (
                f"acceptance drawn: p = {config.p:g}{spread}{chance}, {config.num_speculative_tokens} drafted{where}"
            )
        if law is not None:
            shape = " × ".join(map(str, config.branches))
            self.replays = f"acceptance drawn: trees of {shape}, right by depth and rank with {chances}"
        if len(trace.num_speculative_tokens) != 1:
            raise ConfigError(
                f"trace {config.trace} is of {len(trace.num_speculative_tokens)} drafters in turn, and drafter=replay "
                f"replays one; record it with a single drafter"
            )
        super().__init__(trace, law=law)
        self._stages = [request.stages[0] for request in trace]
        self._deals = config.trace is None or self._known is None
        is_right = any(map(any, chances)) if law is not None else config.trace is not None or config.p > 0
        self.must_count = self._known is None and is_right

    def _stage(self, request_id: str) -> StageTrace:
        """The trace of the request, or, where the trace stands for any, one that depends on the id."""
        if request_id in self._traces:
            return super()._stage(request_id)
        if not self._deals:
            raise ConfigError(
                f"drafter.trace has no request {request_id!r}, but {', '.join(list(self._traces)[:3])}, …; beside "
                f"drafter.known, it must be of the same requests: give them the trace's ids, as with data.id_field"
            )
        return self._stages[crc32(request_id.encode()) % len(self._stages)]

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
