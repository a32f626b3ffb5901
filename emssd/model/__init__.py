"""The model: loaded, probed, and run on ragged inputs, with its KV in an attention backend."""

from emssd.model.borrowed import BorrowedTarget
from emssd.model.loading import load_model
from emssd.model.program import Chain
from emssd.model.rounded import RoundedRunner
from emssd.model.runner import CausalLMRunner, ModelOutput, ModelRunner
from emssd.model.target import TargetModel

__all__ = [
    "BorrowedTarget",
    "CausalLMRunner",
    "Chain",
    "ModelOutput",
    "ModelRunner",
    "RoundedRunner",
    "TargetModel",
    "load_model",
]
