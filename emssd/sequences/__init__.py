"""A `Request` from outside, the `Row` that it grows into, and the `Generation` that comes out."""

from emssd.sampling.matching import MatcherState
from emssd.sequences.generation import Generation
from emssd.sequences.logprobs import TokenLogprob
from emssd.sequences.row import Batch, FinishReason, Request, Row
from emssd.sequences.stopping import Stop, StopStrings

__all__ = [
    "Batch",
    "FinishReason",
    "Generation",
    "MatcherState",
    "Request",
    "Row",
    "Stop",
    "StopStrings",
    "TokenLogprob",
]
