"""Hypothesis strategies of `SamplingParams`."""

from __future__ import annotations

from hypothesis import strategies as st

from emssd.sampling import SamplingParams

__all__ = ["params_of_any_kind"]


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
