"""The model: loaded, probed, and run on ragged inputs, with its KV in an attention backend."""

from emssd.data.model_options import ModelOptions
from emssd.model.borrowed import BorrowedTarget
from emssd.model.checkpoint import load_tokenizer
from emssd.model.interface import ATTENTION_NAME, Attend
from emssd.model.loading import load_model
from emssd.model.random_weights import counted_on
from emssd.model.rounded import RoundedRunner
from emssd.model.runner import CausalLMRunner, ModelOutput, ModelRunner
from emssd.model.target import TargetModel

__all__ = [
    "ATTENTION_NAME",
    "Attend",
    "BorrowedTarget",
    "CausalLMRunner",
    "ModelOptions",
    "ModelOutput",
    "ModelRunner",
    "RoundedRunner",
    "TargetModel",
    "counted_on",
    "load_model",
    "load_tokenizer",
]
