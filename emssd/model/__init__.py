"""The model: loaded, probed, and run on ragged inputs, with its KV in an attention backend."""

from emssd.model.loading import load_model
from emssd.model.runner import CausalLMRunner, ModelOutput, ModelRunner
from emssd.model.target import TargetModel

__all__ = ["CausalLMRunner", "ModelOutput", "ModelRunner", "TargetModel", "load_model"]
