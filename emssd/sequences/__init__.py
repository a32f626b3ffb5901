"""What is generated: a `Request` from outside, its growing `Sequence`, and the `Generation` that comes out."""

from emssd.sequences.generation import Generation
from emssd.sequences.logprobs import TokenLogprob
from emssd.sequences.sequence import Batch, FinishReason, Request, Sequence, TokenIds
from emssd.sequences.stopping import Stop, StopStrings

__all__ = [
    "Batch",
    "FinishReason",
    "Generation",
    "Request",
    "Sequence",
    "Stop",
    "StopStrings",
    "TokenIds",
    "TokenLogprob",
]
