"""The model: loaded, probed, and run on ragged inputs, with its KV in an attention backend."""

from emssd.data.model_options import ModelOptions
from emssd.model.compile.inductor import CompiledPasses
from emssd.model.hf.interface import ATTENTION_NAME, Attend
from emssd.model.load.checkpoint import load_tokenizer
from emssd.model.load.loading import counted_on, load_model
from emssd.model.run.borrowed import BorrowedTarget
from emssd.model.run.rounded import RoundedRunner
from emssd.model.run.runner import CausalLMRunner, ModelOutput, ModelRunner
from emssd.model.run.target import TargetModel

__all__ = [
    "ATTENTION_NAME",
    "Attend",
    "BorrowedTarget",
    "CausalLMRunner",
    "CompiledPasses",
    "ModelOptions",
    "ModelOutput",
    "ModelRunner",
    "RoundedRunner",
    "TargetModel",
    "counted_on",
    "load_model",
    "load_tokenizer",
]
