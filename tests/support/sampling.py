"""Sampling written out by hand, in Python numbers: the noise, the processing, and the loop without a cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from hashlib import blake2b
from typing import Any

from emssd_testing.oracle import next_logits
from hypothesis import strategies as st

from emssd.sampling import SamplingParams


def splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def fmix32(value: int) -> int:
    value = (value ^ value >> 16) * 0x85EBCA6B % 2**32
    value = (value ^ value >> 13) * 0xC2B2AE35 % 2**32
    return value ^ value >> 16


def hashed(seed: int, request_id: str, position: int, token: int, sample: int = 0) -> int:
    text = f"{seed}/{sample}/{request_id}".encode(errors="surrogatepass")
    key = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    high, low = divmod(splitmix64(key ^ splitmix64(position)), 2**32)
    return fmix32(fmix32((token * 0x9E3779B9 + low) % 2**32) ^ high)


def gumbel(bits: int) -> float:
    return -math.log(-math.log((bits + 0.5) * 2**-32))


def probabilities(scores: Seq[float]) -> list[float]:
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    return [weight / math.fsum(weights) for weight in weights]


def scores(logits: Seq[float], params: SamplingParams, prefix: Seq[int], num_prompt: int) -> list[float]:
    """The logits that a token is drawn with; -inf for one that cannot be."""
    changed, vocab = list(logits), range(len(logits))
    for token, bias in params.logit_bias.items():
        changed[token] += bias
    for token in {*prefix}:
        factor = params.repetition_penalty
        changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
    if size := params.no_repeat_ngram_size:
        begun = tuple(prefix[len(prefix) - size + 1 :])
        for start in range(len(prefix) - size + 1):
            if tuple(prefix[start : start + size - 1]) == begun:
                changed[prefix[start + size - 1]] = -math.inf
    output = list(prefix[num_prompt:])
    for token in {*output}:
        changed[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if params.temperature == 0:
        return changed
    changed = [score / params.temperature for score in changed]
    by_probability = sorted(vocab, key=lambda token: -changed[token])
    if params.top_k:
        least = changed[by_probability[min(params.top_k, len(changed)) - 1]]
        changed = [score if score >= least else -math.inf for score in changed]
    if params.top_p < 1:
        chances, taken = probabilities(changed), 0.0
        for token in by_probability:
            least = changed[token]
            taken += chances[token]
            if taken >= params.top_p:
                break
        changed = [score if score >= least else -math.inf for score in changed]
    chances = probabilities(changed)
    most = max(chances)
    changed = [
        score if chance >= params.min_p * most else -math.inf for score, chance in zip(changed, chances, strict=True)
    ]
    if params.typical_p < 1:
        chances, taken = probabilities(changed), 0.0
        expected = -math.fsum(chance * math.log(chance) for chance in chances if chance)
        strange = [abs(-math.log(chance) - expected) if chance else math.inf for chance in chances]
        for token in sorted(vocab, key=strange.__getitem__):
            strangest = strange[token]
            taken += chances[token]
            if taken >= params.typical_p:
                break
        changed = [score if share <= strangest else -math.inf for score, share in zip(changed, strange, strict=True)]
    return changed


def choice(
    logits: Seq[float],
    params: SamplingParams,
    prefix: Seq[int],
    num_prompt: int,
    request_id: str,
    sample: int = 0,
) -> int:
    """The token after `prefix`."""
    totals = scores(logits, params, prefix, num_prompt)
    if params.temperature:
        noise = [gumbel(hashed(params.seed, request_id, len(prefix), token, sample)) for token in range(len(totals))]
        totals = [score + draw for score, draw in zip(totals, noise, strict=True)]
    return totals.index(max(totals))


def logits_behind(model: Any, tokens: Seq[int]) -> list[float]:
    """The logits after a text."""
    logits: list[float] = next_logits(model, tokens).tolist()
    return logits


def sampled(
    model: Any,
    prompt: Seq[int],
    num_new: int,
    params: SamplingParams | None,
    request_id: str,
    eos: Seq[int] = (),
    sample: int = 0,
    logits_of: Callable[[Any, tuple[int, ...]], list[float]] = logits_behind,
) -> tuple[int, ...]:
    """The tokens of one request, one by one."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_new and not (len(tokens) > len(prompt) and tokens[-1] in eos):
        greedy = SamplingParams(temperature=0.0)
        logits = logits_of(model, tuple(tokens))
        tokens.append(choice(logits, params or greedy, tokens, len(prompt), request_id, sample=sample))
    return tuple(tokens[len(prompt) :])


kept_logits = cache(logits_behind)
"""The same of models that nobody changes."""


@cache
def kept_text(
    model: Any, prompt: tuple[int, ...], num_new: int, params: SamplingParams | None, request_id: str
) -> tuple[int, ...]:
    """What is `sampled` from a model that nobody changes."""
    return sampled(model, prompt, num_new, params, request_id, logits_of=kept_logits)


@st.composite
def params_of_any_kind(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    """Greedy with and without penalties, warm and cold, with few options or with many."""

    def some(strategy: st.SearchStrategy[float], neutral: float) -> float:
        return draw(st.sampled_from([neutral, neutral, None]).flatmap(lambda x: strategy if x is None else st.just(x)))

    temperature = draw(st.sampled_from([0.8, 1.0, 0.0, 0.3, 2.0, 1]))
    share = st.floats(0.05, 0.95)
    return SamplingParams(
        temperature=temperature,
        top_k=int(some(st.integers(2, 5) | st.integers(1, vocab_size + 2), 0)),
        top_p=some(share, 1.0),
        min_p=some(share.map(lambda p: p / 2), 0.0),
        typical_p=some(share, 1.0) if temperature else 1.0,
        repetition_penalty=some(st.sampled_from([0.7, 1.3, 2.0]), 1.0),
        presence_penalty=some(st.sampled_from([0.5, -1.0, 2.0]), 0.0),
        frequency_penalty=some(st.sampled_from([0.5, -1.0, 2.0]), 0.0),
        no_repeat_ngram_size=int(some(st.sampled_from([2, 3, 1]), 0)),
        logit_bias=draw(st.just({}) | st.dictionaries(st.integers(0, vocab_size - 1), st.floats(-3, 3), max_size=3)),
        seed=draw(st.integers(0, 3)),
    )
