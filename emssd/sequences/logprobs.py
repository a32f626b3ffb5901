"""`TokenLogprob`: how probable the model finds a token of its output, and which tokens it finds most probable."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TokenLogprob"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One new token, under the model's own distribution: the log-softmax of its logits in float64, as it gives them.

    Neither temperature nor anything else of `SamplingParams` has a part in it.

    Attributes:
        token_id: the token.
        logprob: its log-probability; NaN if the model overflowed.
        top: ids and log-probabilities of the most probable tokens, as many as ``SamplingParams.logprobs`` says, the
            most probable first; equally probable ones in any order.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
