"""`SamplingParams`: how the next token of one request is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any

from emssd.errors import ConfigError, did_you_mean
from emssd.sampling.grammar import Grammar

__all__ = ["MOST_SAMPLES", "SamplingMethod", "SamplingParams"]

MOST_SAMPLES = 65_536  # of a prompt: each takes memory before it is drawn

# `logit_bias` is added apart, as a value that can be hashed
_NOT_PROCESSING = ("logit_bias", "seed", "n", "logprobs", "processed_logprobs", "grammar")
_LARGEST = 2**63  # a tensor holds integers below it
_LONGEST = 200  # characters of a value in an error
_COLDEST = 1e-6  # below it, logits divided by the temperature leave the range of their numbers


class SamplingMethod(str, Enum):
    """The rule by which a drafted token is accepted."""

    coupled = "coupled"
    residual = "residual"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The choice of the next token of a request. The names are Transformers', and so is their order of effect.

    First come `logit_bias`, `repetition_penalty`, `no_repeat_ngram_size`, and the presence and frequency penalties;
    then `temperature`, `top_k`, `top_p`, `min_p`, and `typical_p`, each on what is left by the ones before.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: only so many of the most probable tokens; 0 takes all. Tokens as probable as the last of them stay too.
        top_p: only the most probable tokens that together have this probability; 1 takes all. As with `top_k`.
        min_p: only tokens with at least this share of the largest probability; 0 takes all.
        typical_p: only the tokens nearest to the expected surprise that together have this probability; 1 takes all.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in prompt or output.
        presence_penalty: is subtracted from the logits of tokens in the output.
        frequency_penalty: is subtracted once for each time that the token is in the output.
        no_repeat_ngram_size: no sequence of so many tokens occurs twice in prompt and output; 0 allows all.
        logit_bias: by token id, what is added to its logit; ``-inf`` forbids the token.
        method: ``coupled`` draws each token with noise that is a hash of its place, so that the text is the same
            whatever drafts. ``residual`` holds drafts against the distributions that they were drawn from (block and
            traversal verification): the law is the same, but the text depends on the drafts. At temperature 0 both are
            one.
        seed: of the noise. The same seed, request id, sample, prompt and model give the same text.
        n: how many texts are drawn for a prompt, at most 65,536. Each is what it would be if it were drawn alone.
        logprobs: give each new token's log-probability, and those of so many of the most probable tokens. They are the
            model's own: of its logits as it gives them, before anything on this list. ``None`` gives none.
        grammar: the form of the output: ``json`` (any JSON object), a JSON schema or a file that holds one
            (``SCHEMA.json``), a regular expression (``regex:EXPRESSION``), or a Lark grammar (``lark:GRAMMAR``, or a
            file ``GRAMMAR.lark``). Tokens that cannot go on with it are left out before all of the above.
        processed_logprobs: `logprobs` are those of the distribution that tokens are drawn from, after all of the above.

    Raises:
        ConfigError: a value that cannot be.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    method: SamplingMethod = SamplingMethod.coupled
    seed: int = 0
    n: int = 1
    logprobs: int | None = None
    processed_logprobs: bool = False
    grammar: Grammar | Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        self._check_number("temperature", lambda t: t == 0 or t >= _COLDEST, f"it must be 0 or at least {_COLDEST}")
        self._check_number("top_p", lambda p: 0 < p <= 1, "it must be above 0, and at most 1, which takes all tokens")
        self._check_number("min_p", lambda p: 0 <= p <= 1, "it must be from 0 to 1, and 0 takes all tokens")
        self._check_number("typical_p", lambda p: 0 < p <= 1, "it must be above 0, and at most 1, which takes all")
        self._check_number("repetition_penalty", lambda r: r > 0, "it must be above 0, and 1 is none")
        self._check_number("presence_penalty", lambda _: True, "it must be a finite number")
        self._check_number("frequency_penalty", lambda _: True, "it must be a finite number")
        for name in ("top_k", "no_repeat_ngram_size"):
            self._check_whole(name, "it must be a whole number of at least 0, which is off", smallest=0)
        self._check_whole("seed", "it must be a whole number of at most 308 digits")
        possible = f"it must be a whole number of at least 1, and at most {MOST_SAMPLES:,}"
        self._check_whole("n", possible, smallest=1, largest=MOST_SAMPLES)
        if self.logprobs is not None:
            self._check_whole("logprobs", "it must be a whole number of at least 0, or None, which is off", smallest=0)
        if self.temperature == 0 and self.n > 1:
            raise ConfigError(
                f"n is {self.n} at temperature 0, which would give {self.n} equal texts; raise temperature, or leave n "
                f"out"
            )
        if self.temperature == 0 and self.typical_p < 1:
            raise ConfigError(
                f"typical_p is {self.typical_p} at temperature 0, which takes the most probable token, typical or not; "
                f"raise temperature, or leave typical_p out"
            )
        try:
            object.__setattr__(self, "method", SamplingMethod(self.method))
        except ValueError:
            guess = did_you_mean(f"{self.method}", names := [method.value for method in SamplingMethod])
            raise ConfigError(f"method is {_shown(self.method)}{guess or ';'} choose {' or '.join(names)}") from None
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"logit_bias is {_shown(self.logit_bias)}; it must map token ids to numbers")
        biases = {token: _number(bias) for token, bias in self.logit_bias.items()}
        for token, bias in biases.items():
            if not _is_whole(token) or not 0 <= token < _LARGEST:
                raise ConfigError(
                    f"logit_bias has a token id {_shown(token)}; it must be a whole number of at least 0, and in the "
                    f"model's vocabulary"
                )
            if math.isnan(bias) or bias == math.inf:
                shown = _shown(self.logit_bias[token])
                raise ConfigError(f"logit_bias of token {token} is {shown}; it must be a finite number, or -inf")
        if self.grammar is not None:
            object.__setattr__(self, "grammar", Grammar.of(self.grammar))
        object.__setattr__(self, "logit_bias", MappingProxyType(biases))  # drafters see it, too

    def __reduce__(self) -> tuple[Callable[[], SamplingParams], tuple[()]]:
        """For pickle and copy, which take no read-only mapping."""
        values = {param.name: getattr(self, param.name) for param in fields(self)}
        return partial(SamplingParams, **values | {"logit_bias": dict(self.logit_bias)}), ()

    @property
    def is_greedy(self) -> bool:
        """Whether the token has the model's largest logit."""
        return self.takes_largest and self.grammar is None

    @property
    def takes_largest(self) -> bool:
        """Whether the token has the model's largest logit of all tokens that `grammar` allows."""
        return self.temperature == 0 and not self.logit_bias and not self.reads_prefix

    @property
    def is_residual(self) -> bool:
        """Whether drafts are held against the distributions that they were drawn from."""
        return self.method is SamplingMethod.residual and self.temperature > 0

    @property
    def reads_prefix(self) -> bool:
        """Whether the choice depends on the tokens before it other than through the model."""
        return self.repetition_penalty != 1 or self.no_repeat_ngram_size > 0 or self.counts_output

    @property
    def reads_path(self) -> bool:
        """Whether the choice after a drafted token depends on that token other than through the model."""
        return self.reads_prefix or self.grammar is not None

    @property
    def processing(self) -> Hashable:
        """All that is done to logits: params with the same can be processed together."""
        values = [getattr(self, param.name) for param in fields(self) if param.name not in _NOT_PROCESSING]
        return (*values, *self.logit_bias.items(), self.grammar is None)

    @property
    def counts_output(self) -> bool:
        """Whether the choice depends on how often each token is in the output."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ConfigError: `logit_bias` has a token, or `logprobs` more tokens, than the vocabulary."""
        if unknown := [token for token in self.logit_bias if token >= vocab_size]:
            raise ConfigError(f"logit_bias has token {unknown[0]}, but the model's vocabulary has {vocab_size} tokens")
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise ConfigError(f"logprobs is {self.logprobs}, but the model's vocabulary has {vocab_size} tokens")

    def _check_number(self, name: str, is_possible: Callable[[float], bool], possible: str) -> None:
        number = _number(getattr(self, name))
        if not math.isfinite(number) or not is_possible(number):
            raise ConfigError(f"{name} is {_shown(getattr(self, name))}; {possible}")
        object.__setattr__(self, name, number)

    def _check_whole(self, name: str, possible: str, smallest: float = -math.inf, largest: float = math.inf) -> None:
        value = getattr(self, name)
        if not _is_whole(value) or math.isnan(_number(value)) or not smallest <= value <= largest:
            raise ConfigError(f"{name} is {_shown(value)}; {possible}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> float:
    """`value` as what tensors hold; NaN if it is no number, or one that they cannot hold."""
    try:
        return float(value) if _is_whole(value) or isinstance(value, float) else math.nan
    except OverflowError:
        return math.nan


def _shown(value: object) -> str:
    """`value` as an error repeats it: Python writes no number of more than 4,300 digits."""
    if _is_whole(value) and math.isnan(_number(value)):
        return "a number of more than 308 digits"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
