"""What is being generated: a `Request` from outside, its growing `Sequence`, and the `Batch` of one step."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import overload

from emssd.sampling import SamplingParams
from emssd.sequences.logprobs import TokenLogprob
from emssd.sequences.stopping import Stop

__all__ = ["Batch", "FinishReason", "Request", "Sequence", "TokenIds"]


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
        sampling: how its tokens are chosen; ``None`` takes the most probable ones.
        sample_of: of one sample among several, the id of the request that they are samples of; see `samples`.
        sample: which of them it is, from 0.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop: Stop | None = None
    sampling: SamplingParams | None = None
    sample_of: str | None = None
    sample: int = 0

    @property
    def prompt_id(self) -> str:
        """What all samples of a prompt have in common: `sample_of`, or the id of the request itself.

        With `sample`, it tells what is drawn from anything else, and decides what is drawn.
        """
        return self.request_id if self.sample_of is None else self.sample_of

    def samples(self) -> list[Request]:
        """One request for each text that ``sampling.n`` asks for; itself where that is one."""
        if self.sampling is None or self.sampling.n == 1:
            return [self]
        one = replace(self, sampling=replace(self.sampling, n=1), sample_of=self.prompt_id)
        numbers = range(self.sampling.n)
        return [replace(one, request_id=f"{self.request_id}#{number}", sample=number) for number in numbers]


class TokenIds(Seq[int]):
    """The tokens of a sequence, to be read: indices, slices (which are lists), iteration, ``==`` with any sequence.

    It shows the list that it is given as that grows, and has nothing to change it with.
    """

    __slots__ = ("_ids",)
    __hash__ = None  # type: ignore[assignment]  # it grows

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._ids[index]

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __eq__(self, other: object) -> bool:
        return self._ids == list(other) if isinstance(other, Seq) else NotImplemented

    def __repr__(self) -> str:
        return repr(self._ids)


@dataclass(frozen=True, slots=True)
class Sequence:
    """A request while it runs. Everybody may read it; only the decode loop changes it, through its methods.

    Invariant between steps once the prompt is computed: ``num_cached == len(tokens) - 1``, as the newest token
    has no KV yet. (A row that EOS has just cut may have more, until it is released.)

    Attributes:
        tokens: prompt and generated token ids; what is given is copied.
        max_length: prompt and output together grow no longer than this.
        num_cached: how many leading tokens have their KV in the target's cache.
        num_steps, num_drafted, num_accepted: verification steps, drafted tokens and accepted draft tokens so far.
        finish_reason: why it ended; ``None`` as long as it runs.
    """

    request: Request
    tokens: TokenIds = field(default_factory=lambda: TokenIds([]))
    max_length: int = 0
    num_cached: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    _ids: list[int] = field(init=False, repr=False, compare=False)
    _logprobs: list[TokenLogprob] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        ids = list(self.tokens or self.request.prompt_ids)
        self._set(_ids=ids, tokens=TokenIds(ids))
        if not self.max_length:
            self._set(max_length=len(self.request.prompt_ids) + self.request.max_new_tokens)

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def output_ids(self) -> list[int]:
        """The generated token ids."""
        return self._ids[len(self.request.prompt_ids) :]

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Those of the generated tokens; ``None`` if the request does not ask for them."""
        asked = self.request.sampling is not None and self.request.sampling.logprobs is not None
        return tuple(self._logprobs) if asked else None

    @property
    def num_uncached(self) -> int:
        """How many tokens have no KV yet: 1 while decoding, more while the prompt is computed."""
        return len(self._ids) - self.num_cached

    @property
    def num_remaining(self) -> int:
        """How many tokens may still be generated."""
        return self.max_length - len(self._ids)

    def taken(self, new_tokens: Seq[int]) -> tuple[list[int], FinishReason | None]:
        """What `advance` would append of `new_tokens`, and why that would end the sequence; nothing is changed.

        They are cut after the first EOS or stop string and at the limit. Where one token brings several reasons, EOS
        comes before a stop string, and that before the limit.
        """
        stop, before, num_remaining = self.request.stop, len(self._ids), self.num_remaining
        tokens = list(new_tokens[:num_remaining])
        ending = FinishReason.LENGTH if len(tokens) >= num_remaining else None
        if stop is None and self.request.eos_token_ids.isdisjoint(tokens):
            return tokens, ending
        num_prompt = len(self.request.prompt_ids)
        try:
            for count, token in enumerate(tokens, start=1):
                if token in self.request.eos_token_ids:
                    return tokens[:count], FinishReason.EOS
                if stop is not None:
                    self._ids.append(token)
                    if stop.completed_by_last(self._ids, num_prompt):
                        return tokens[:count], FinishReason.STOP
        finally:
            del self._ids[before:]
        return tokens, ending

    def advance(
        self,
        tokens: Seq[int],
        reason: FinishReason | None,
        *,
        num_drafted: int,
        num_accepted: int,
        logprobs: Seq[TokenLogprob] = (),
    ) -> None:
        """Count a verification step that accepted `num_accepted` of `num_drafted` tokens.

        Args:
            tokens, reason: what was `taken` of the accepted tokens and the target's own one.
            num_drafted, num_accepted: drafted tokens that were verified, and how many of them were right.
            logprobs: of the accepted tokens and the target's own one, taken or not; if the request asks for them.
        """
        set_field = object.__setattr__  # five at once by `_set` take twice as long, and every row comes here every step
        set_field(self, "num_cached", len(self._ids) + num_accepted)  # all but the target's own newest token
        set_field(self, "num_steps", self.num_steps + 1)
        set_field(self, "num_drafted", self.num_drafted + num_drafted)
        set_field(self, "num_accepted", self.num_accepted + num_accepted)
        set_field(self, "finish_reason", reason)
        self._ids.extend(tokens)
        self._logprobs.extend(logprobs[: len(tokens)])

    def extend(self, new_tokens: Seq[int]) -> None:
        """Append what is `taken` of `new_tokens` and set `finish_reason`; no step is counted and nothing is cached."""
        tokens, reason = self.taken(new_tokens)
        self._ids.extend(tokens)
        self._set(finish_reason=reason)

    def set_cached(self, num_cached: int) -> None:
        """From now on, `num_cached` leading tokens have their KV in the cache: after a piece of a prompt, or none."""
        self._set(num_cached=num_cached)

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


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
