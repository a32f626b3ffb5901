"""Made-up acceptance traces: every token of the target is one that the drafter foresees, or not, by chance."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from emssd.errors import ConfigError
from emssd.simulate.traces import RequestTrace, StageTrace, Trace

__all__ = ["geometric_trace"]


def geometric_trace(
    p: float,
    num_requests: int,
    *,
    num_speculative_tokens: int,
    num_prompt: int = 1,
    max_new_tokens: int = 128,
    concentration: float | None = None,
    seed: int = 0,
) -> Trace:
    """A trace in which the acceptance length follows the paper's law (Equation 6), whatever the budgets are.

    One coin per output token says whether the drafter has it right. A step that drafts n tokens looks at the coins of n
    positions, up to the first wrong one; the target's own token passes one over, and no coin is looked at twice. So the
    acceptance lengths are independent and geometric, and runs under different policies are about the same text.

    Args:
        p: probability that a drafted token is right, given that those before it are.
        num_requests: how many; all arrive at the start.
        num_speculative_tokens: what the drafter proposes at every position.
        num_prompt, max_new_tokens: tokens of each prompt and of each output.
        concentration: draw each request's own p from a Beta distribution of mean `p` whose parameters have this sum;
            ``None`` gives all the same.

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
    random = np.random.default_rng(seed)
    own = [p] * num_requests
    if concentration is not None:
        own = random.beta(p * concentration, (1 - p) * concentration, num_requests).tolist()
    requests = []
    for i, chance in enumerate(own):
        right = _runs(random.random(max_new_tokens) < chance, num_speculative_tokens)
        drafted = (num_speculative_tokens,) * max_new_tokens
        requests.append(RequestTrace(str(i), num_prompt, max_new_tokens, (StageTrace(drafted, right),)))
    return Trace((num_speculative_tokens,), tuple(requests))


def _runs(coins: npt.NDArray[np.bool_], longest: int) -> tuple[int, ...]:
    """For each place, how many coins in a row are right from there on, at most `longest`."""
    places = np.arange(len(coins))
    wrong = np.where(coins, len(coins), places)
    next_wrong = np.minimum.accumulate(wrong[::-1])[::-1]
    return tuple(np.minimum(next_wrong - places, longest).tolist())
