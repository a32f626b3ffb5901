"""The model: loaded, probed, and run on ragged inputs, with its KV in an attention backend."""

from emssd.model.borrowed import BorrowedTarget
from emssd.model.loading import load_model
from emssd.model.runner import CausalLMRunner, ModelOutput, ModelRunner
from emssd.model.target import TargetModel

__all__ = ["BorrowedTarget", "CausalLMRunner", "ModelOutput", "ModelRunner", "TargetModel", "load_model"]
