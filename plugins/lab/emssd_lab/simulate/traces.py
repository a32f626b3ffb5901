"""Acceptance traces: per request and output position, what a drafter has to offer and how much of it is right."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from emssd.data.typed import read_json, typed
from emssd.errors import ConfigError
from emssd.sequences import Request, Row

__all__ = ["VOCAB_SIZE", "WRONG", "save_trace"]

# Tokens of simulated sequences: one that the target generates, one that it does not, and the one that ends a row.
RIGHT, WRONG, _EOS = 0, 1, 2
VOCAB_SIZE = 3


@dataclass(frozen=True, slots=True)
class StageTrace:
    """The drafts of one drafter for one request. Position ``i`` is the state after ``i`` new tokens.

    It also tells the gain of a smaller budget: from ``n ≤ drafted[i]`` tokens, ``min(n, right[i])`` are accepted.

    Attributes:
        drafted: ``[output length]`` tokens that the drafter proposes at this position if it may.
        right: ``[output length]`` how many of them the target goes on to generate, up to the first wrong one.

    Raises:
        ConfigError: values that contradict each other.
    """

    drafted: tuple[int, ...]
    right: tuple[int, ...]

    def __post_init__(self) -> None:
        length = len(self.drafted)
        if len(self.right) != length:
            raise ConfigError("right has not as many entries as drafted, which cannot be; record it again")
        for position, (drafted, right) in enumerate(zip(self.drafted, self.right, strict=True)):
            if not 0 <= right <= min(drafted, length - position):
                raise ConfigError(
                    f"{right} of {drafted} drafted tokens are right at position {position} of {length}, which cannot "
                    f"be; record it again"
                )


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request, as its drafters see it.

    Attributes:
        stages: one for each drafter, in their order; the target's output is as long as they say.

    Raises:
        ConfigError: values that contradict each other.
    """

    request_id: str
    num_prompt: int
    max_new_tokens: int
    stages: tuple[StageTrace, ...]

    def __post_init__(self) -> None:
        lengths = {len(stage.drafted) for stage in self.stages}
        if self.num_prompt < 1 or len(lengths) != 1 or not 1 <= max(lengths) <= self.max_new_tokens:
            raise ConfigError(
                f"request {self.request_id!r} has {self.num_prompt} prompt tokens, outputs of {sorted(lengths)} tokens "
                f"by its drafters, and a limit of {self.max_new_tokens}, which cannot be; record it again"
            )

    @property
    def output_length(self) -> int:
        return len(self.stages[0].drafted)

    def row(self) -> Row:
        """The request before its first step; it ends where the recorded one did."""
        request = Request(self.request_id, (RIGHT,) * self.num_prompt, self.max_new_tokens, frozenset([_EOS]))
        return Row(request)

    def tokens(self, position: int, count: int) -> list[int]:
        """`count` tokens of the target from `position` on; where the output ended before its limit, an EOS ends it."""
        tokens, last = [RIGHT] * count, self.output_length - 1 - position
        if self.output_length < self.max_new_tokens and 0 <= last < count:
            tokens[last] = _EOS
        return tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a run, in order of arrival.

    Attributes:
        num_speculative_tokens: for each drafter, the most tokens that it proposes for one row in one step.

    Raises:
        ConfigError: two requests of one id, not one stage for each drafter, or more drafted than a drafter can.
    """

    num_speculative_tokens: tuple[int, ...]
    requests: tuple[RequestTrace, ...]

    def __post_init__(self) -> None:
        if len({request.request_id for request in self.requests}) < len(self.requests):
            raise ConfigError("two requests of the trace have the same id; make them unique")
        for request in self.requests:
            drafted = [max(stage.drafted) for stage in request.stages]
            most = list(self.num_speculative_tokens)
            if len(drafted) != len(most) or any(map(int.__gt__, drafted, most)):
                raise ConfigError(
                    f"request {request.request_id!r} has drafts of up to {drafted} tokens by drafter, and the drafters "
                    f"of the trace propose at most {most}, which cannot be; record it again"
                )

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[RequestTrace]:
        return iter(self.requests)


def save_trace(trace: Trace, path: Path) -> None:
    """Write `trace` as JSON lines: what holds for all requests first, then one line per request."""
    lines: list[dict[str, Any]] = [{"num_speculative_tokens": trace.num_speculative_tokens}]
    lines += [dataclasses.asdict(request) for request in trace]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), encoding="utf-8")


def load_trace(path: Path) -> Trace:
    """Read what `save_trace` wrote. Raises ConfigError: the file cannot be read, or holds something else."""
    try:
        head, *lines = [read_json(line) for line in path.read_bytes().split(b"\n") if line]
        most = typed(head, _Head).num_speculative_tokens
        return Trace(most, tuple(typed(line, RequestTrace) for line in lines))
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"trace {path}: {error}") from error
    except ValueError as error:
        raise ConfigError(
            f"{path} holds no acceptance trace ({error}); record one with: python -m emssd_lab.simulate record"
        ) from error


class _Head(msgspec.Struct):
    num_speculative_tokens: tuple[int, ...]


def geometric_trace(
    p: float,
    num_requests: int,
    *,
    num_speculative_tokens: int,
    num_prompt: int = 1,
    max_new_tokens: int = 128,
    concentration: float | None = None,
    coverage: float = 1.0,
    seed: int = 0,
) -> Trace:
    """A trace in which the acceptance length follows the paper's law (Equation 6), whatever the budgets are.

    One coin per output token says whether the drafter has it right. A step that drafts n tokens looks at the coins of n
    positions, up to the first wrong one; the target's own token passes one over, and no coin is looked at twice. So the
    acceptance lengths are independent and geometric, and runs under different policies are about the same text.

    Args:
        p: probability that a drafted token is right, given that those before it are.
        num_requests: all arrive at the start.
        num_speculative_tokens: what the drafter proposes at every position.
        concentration: draw each request's own p from a Beta distribution of mean `p` whose parameters have this sum;
            ``None`` gives all the same.
        coverage: share of positions at which anything is drafted.

    Raises:
        ConfigError: values outside of their ranges.
    """
    if not 0 <= p <= 1 or (concentration is not None and not (0 < p < 1 and concentration > 0)):
        raise ConfigError(
            f"p is {p} and concentration {concentration}; p is a probability, and with a concentration, which must be "
            f"above 0, p must lie between 0 and 1"
        )
    if num_requests < 1 or num_speculative_tokens < 0 or num_prompt < 1 or max_new_tokens < 1:
        raise ConfigError(
            f"{num_requests} requests with {num_prompt} prompt tokens, {max_new_tokens} new ones, "
            f"{num_speculative_tokens} drafted; all must be at least 1, the drafted ones at least 0"
        )
    random, places = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    chances = [p] * num_requests
    if concentration is not None:
        chances = random.beta(p * concentration, (1 - p) * concentration, num_requests).tolist()
    requests = []
    for i, chance in enumerate(chances):
        right = _runs(random.random(max_new_tokens) < chance, num_speculative_tokens)
        is_there = places.random(max_new_tokens) < coverage
        stage = StageTrace(*(tuple((counts * is_there).tolist()) for counts in (num_speculative_tokens, right)))
        requests.append(RequestTrace(str(i), num_prompt, max_new_tokens, (stage,)))
    return Trace((num_speculative_tokens,), tuple(requests))


def _runs(coins: npt.NDArray[np.bool_], longest: int) -> npt.NDArray[np.int64]:
    """For each position, how many coins in a row are right from there on, at most `longest`."""
    positions = np.arange(len(coins))
    wrong = np.where(coins, len(coins), positions)
    return np.minimum(np.minimum.accumulate(wrong[::-1])[::-1] - positions, longest)
