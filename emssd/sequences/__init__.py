"""A `Request` from outside, the `Row` that it grows into, and the `Generation` that comes out."""

from emssd.sampling.matching import MatcherState
from emssd.sequences.generation import Generation
from emssd.sequences.row import Batch, FinishReason, Request, Row, TokenLogprob
from emssd.sequences.stopping import Stop, StopStrings
from emssd.sequences.token_bytes import TokenBytes

__all__ = [
    "Batch",
    "FinishReason",
    "Generation",
    "MatcherState",
    "Request",
    "Row",
    "Stop",
    "StopStrings",
    "TokenBytes",
    "TokenLogprob",
]
