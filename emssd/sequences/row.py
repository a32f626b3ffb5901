"""A `Request` from outside, the `Row` that it grows into, and the `Batch` of one step."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import ClassVar, NoReturn

from emssd.sampling import SamplingParams
from emssd.sampling.matching import MatcherState
from emssd.sequences.stopping import Stop

__all__ = ["Batch", "FinishReason", "Request", "Row", "TokenLogprob"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One new token with its log-probability in float64, as `SamplingParams.logprobs` says.

    Attributes:
        token_id: the token.
        logprob: its log-probability; NaN if the model overflowed.
        top: ids and log-probabilities of the most probable tokens, as many as ``SamplingParams.logprobs`` says, the
            most probable first; equally probable ones in any order.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class FinishReason(str, Enum):
    """The reason why a row ended; ``error`` where no token could follow, as `Generation.error` says."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


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
        """The id that all samples of a prompt share: `sample_of`, or the id of the request itself.

        With `sample`, it identifies what is drawn, and seeds it.
        """
        return self.request_id if self.sample_of is None else self.sample_of

    def samples(self) -> list[Request]:
        """One request for each text that ``sampling.n`` asks for; itself where that is one."""
        if self.sampling is None or self.sampling.n == 1:
            return [self]
        one = replace(self, sampling=replace(self.sampling, n=1), sample_of=self.prompt_id)
        numbers = range(self.sampling.n)
        return [replace(one, request_id=f"{self.request_id}#{number}", sample=number) for number in numbers]


class _TokenIds(list[int]):
    """The token ids of a row: a list that can only be read."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise AttributeError("the tokens of a row can only be read")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse  # type: ignore[assignment]
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


@dataclass(slots=True, eq=False)
class Row:
    """A request while it runs. The decode loop changes it, and plugins read it.

    Invariant between steps once the prompt is computed: ``num_cached == len(tokens) - 1``, as the newest token has no
    KV yet. A preempted row has less. A row that has just ended may have more, as its end cuts off accepted tokens.

    Attributes:
        tokens: prompt and generated token ids, to be read only.
        max_length: prompt and output together grow no longer than this.
        num_cached: how many leading tokens have their KV in the target's cache.
        num_steps, num_drafted, num_accepted: verification steps, drafted tokens and accepted draft tokens so far.
        finish_reason: why it ended; ``None`` as long as it runs.
        logprobs: of the generated tokens, if the request asks for them.
        grammar: which tokens may follow by the grammar of the request, if it has one.
        request_id: that of the request.
    """

    tokens: ClassVar[list[int]] = property(attrgetter("_tokens"))  # type: ignore[assignment]  # reads like a field

    request: Request
    _tokens: list[int] = field(default_factory=list)
    max_length: int = 0
    num_cached: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    grammar: MatcherState | None = None
    request_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.request_id, self._tokens = self.request.request_id, _TokenIds(self._tokens or self.request.prompt_ids)
        self.max_length = self.max_length or len(self.request.prompt_ids) + self.request.max_new_tokens

    @property
    def output_ids(self) -> list[int]:
        """The generated token ids."""
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def num_uncached(self) -> int:
        """The number of tokens without KV: 1 while decoding, more while the prompt is computed."""
        return len(self.tokens) - self.num_cached

    @property
    def num_remaining(self) -> int:
        """The number of tokens that may still be generated."""
        return self.max_length - len(self.tokens)

    def taken(self, new_tokens: Seq[int]) -> tuple[list[int], FinishReason | None]:
        """The tokens that `extend` would append of `new_tokens`, and the reason for which the row would end.

        They are cut after the first EOS or stop string and at the limit. Where one token brings several reasons, EOS
        comes before a stop string, and that before the limit.
        """
        request, num_remaining = self.request, self.max_length - len(self.tokens)
        tokens = list(new_tokens[:num_remaining])
        ending = FinishReason.LENGTH if len(tokens) >= num_remaining else None
        if request.stop is None and request.eos_token_ids.isdisjoint(tokens):
            return tokens, ending
        text = [*self.tokens] if request.stop is not None else []  # a stop string may begin in the prompt
        for count, token in enumerate(tokens, start=1):
            if token in request.eos_token_ids:
                return tokens[:count], FinishReason.EOS
            text.append(token)
            if request.stop is not None and request.stop.completed_by_last(text, len(request.prompt_ids)):
                return tokens[:count], FinishReason.STOP
        return tokens, ending

    def advance(
        self,
        tokens: Seq[int],
        reason: FinishReason | None,
        num_drafted: int,
        num_accepted: int,
        logprobs: Seq[TokenLogprob] = (),
    ) -> None:
        """Append the tokens of a verification step, and count its drafts.

        Args:
            tokens, reason: what `taken` gave for the accepted tokens and the target's own one.
            num_drafted, num_accepted: drafted tokens that were verified, and how many of them were right.
            logprobs: of all accepted tokens and the target's own one, if the request asks for them.
        """
        self.num_cached = len(self.tokens) + num_accepted  # all but the target's own newest token
        self.num_steps += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.finish_reason = reason
        self.logprobs += tuple(logprobs[: len(tokens)]) if logprobs else ()
        self._append(tokens)

    def extend(self, new_tokens: Seq[int]) -> None:
        """Append what is `taken` of `new_tokens` and set `finish_reason`; no step is counted and nothing is cached."""
        tokens, self.finish_reason = self.taken(new_tokens)
        self._append(tokens)

    def _append(self, tokens: Seq[int]) -> None:
        list.extend(self._tokens, tokens)
        if self.grammar is not None:
            self.grammar = self.grammar.settled(tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows that are drafted for and verified in one step, in order."""

    rows: tuple[Row, ...]

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the most probable tokens is wanted."""
        return not any(map(attrgetter("request.sampling"), self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Request ids in row order."""
        return tuple([row.request_id for row in self.rows])
