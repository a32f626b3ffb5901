"""The choice of the target's next token: greedy, or sampled with noise that is a hash of where the token stands."""

from emssd.sampling.params import SamplingMethod, SamplingParams

__all__ = ["SamplingMethod", "SamplingParams"]
