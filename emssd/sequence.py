"""What is being generated: a `Request` from outside, its growing `Sequence`, and the `Batch` of one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from emssd.stopping import Stop

__all__ = ["Batch", "FinishReason", "Request", "Sequence"]


class FinishReason(str, Enum):
    """Why a sequence ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    Args:
        request_id: unique among the requests of one engine.
        prompt_ids: token ids of the prompt, at least one.
        max_new_tokens: upper limit of generated tokens, at least one; the EOS token counts.
        eos_token_ids: generation ends after the first of these.
        stop: generation ends after the token that completes one of these. Without both, only the limit ends it.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop: Stop | None = None


@dataclass(slots=True)
class Sequence:
    """A request while it runs.

    Invariant between steps once the prompt is computed: ``num_cached == len(tokens) - 1``, as the newest token
    has no KV yet. (A row that EOS has just cut may have more, until it is released.)

    Attributes:
        tokens: prompt and generated token ids. Drafters read it; only the engine appends to it.
        max_length: prompt and output together grow no longer than this.
        num_cached: how many leading tokens have their KV in the target's cache.
        num_steps, num_drafted, num_accepted: verification steps, drafted tokens and accepted draft tokens so far.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    max_length: int = 0
    num_cached: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.request.prompt_ids)
        if not self.max_length:
            self.max_length = len(self.request.prompt_ids) + self.request.max_new_tokens

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def output_ids(self) -> list[int]:
        """The generated token ids."""
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def num_uncached(self) -> int:
        """How many tokens have no KV yet: 1 while decoding, more while the prompt is computed."""
        return len(self.tokens) - self.num_cached

    @property
    def num_remaining(self) -> int:
        """How many tokens may still be generated."""
        return self.max_length - len(self.tokens)

    def extend(self, new_tokens: list[int]) -> None:
        """Append `new_tokens`, cut after the first EOS or stop string and at the limit; sets `finish_reason`.

        Where one token brings several reasons, EOS comes before a stop string, and that before the limit.
        """
        stop, num_prompt = self.request.stop, len(self.request.prompt_ids)
        for token in new_tokens[: self.num_remaining]:
            self.tokens.append(token)
            if token in self.request.eos_token_ids:
                self.finish_reason = FinishReason.EOS
                return
            if stop is not None and stop.completed_by_last(self.tokens, num_prompt):
                self.finish_reason = FinishReason.STOP
                return
        if self.num_remaining <= 0:
            self.finish_reason = FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences that are drafted for and verified in one step, in row order."""

    sequences: tuple[Sequence, ...]

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Request ids in row order."""
        return tuple(sequence.request.request_id for sequence in self.sequences)
