"""`RoundedRunner`: the target with its linear weights rounded to 4 or 8 bits, on the KV cache of the target itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from emssd.attention import AttentionBackend, PackedInputs, StepPlan
from emssd.errors import ConfigError
from emssd.model.compile.int8 import Rounded, rounded
from emssd.model.hf.recurrent_states import StateCache
from emssd.model.run.runner import CausalLMRunner, ModelOutput
from emssd.model.run.target import Computed, TargetModel
from emssd.native import free_module, load_kernels, why_unavailable

__all__ = ["RoundedRunner"]


class RoundedRunner(CausalLMRunner):
    """Runs steps of a model with rounded linear weights, and shares the KV cache of the runner it is `attached` to.

    It reads the KV that the target has committed. What it computes goes to the slots after it, which the target's next
    step writes before it reads them. So it has nothing to commit, to release or to catch up with. Whatever is no
    linear layer is the target's own, and so is the compiled program.

    The weights are rounded when it is attached, and again when the model was renewed.

    Args:
        model: whose weights they are.
        bits: 4, in groups of 32 inputs, or 8, by output.
        num_layers: only so many of the first layers are run, uncompiled; ``None`` for all.

    Raises:
        ConfigError: other bits, or not so many layers.
        UnsupportedModelError: its layers are not found, or cannot be left out.
    """

    def __init__(self, model: TargetModel, bits: int, num_layers: int | None = None) -> None:
        if bits not in (4, 8):
            raise ConfigError(f"drafter.bits is {bits}; choose 4 or 8")
        if num_layers is not None:
            if not 1 <= num_layers <= model.num_layers:
                raise ConfigError(f"drafter.layers is {num_layers}; choose 1 to {model.num_layers}, as the target has")
            model.prepare_hidden(()).check_cut()
        self.model, self.bits, self.num_layers = model, bits, num_layers
        self.vocab_size, self.max_model_len = model.vocab_size, model.max_model_len
        self.device, self.dtype = model.device, model.dtype
        self._owner: Callable[[], CausalLMRunner | None] = lambda: None
        self._made_of: tuple[int, Any] | None = None  # the state of the model that was rounded, and its program
        self._weights: RoundedWeights | None = None
        self._program: Any = None

    def attach(self, runner: CausalLMRunner) -> None:
        """Share the KV cache of `runner`, of the same model, and round the weights."""
        self._owner = weakref.ref(runner)
        self._follow()

    @property
    def is_attached(self) -> bool:
        """Whether there is a KV cache to share."""
        return self._owner() is not None

    @property
    def _runner(self) -> CausalLMRunner:
        owner = self._owner()
        assert owner is not None, "not attached to the runner of the target"
        return owner

    @property
    def backend(self) -> AttentionBackend:  # type: ignore[override]  # read-only
        """The target's."""
        return self._runner.backend

    @property
    def _states(self) -> StateCache | None:  # type: ignore[override]  # read-only
        return self._runner._states

    def run(self, packed: PackedInputs) -> ModelOutput:
        self._follow()
        return super().run(packed)

    def _compute(self, plan: StepPlan) -> Computed:
        plan = replace(plan, replay=None)  # a recorded pass is one of the target's own weights
        within = nullcontext() if self._weights is None else self._weights
        with within:
            return self.model(plan, self.backend, (), self.num_layers, self._program or self._eager)

    def _eager(self, *args: Any, step: Any, **kwargs: Any) -> torch.Tensor:
        return self.model.run(*args, **kwargs)

    def _follow(self) -> None:
        """Round the weights again if the model was renewed."""
        compiled = self.model.compiled if self.num_layers is None else None
        state = self.model.num_renewals, compiled
        if self._made_of is None or self._made_of[0] != state[0] or self._made_of[1] is not state[1]:
            self._made_of = self._weights = self._program = None  # memory first
            if compiled is not None:
                self._program = compiled.with_weights(lambda weight: rounded(weight, self.bits))
            else:
                self._weights = RoundedWeights(self.model.model, self.bits)
            self._made_of = state


class RoundedWeights(TorchFunctionMode):
    """Within, each `torch.nn.Linear` of a model computes with rounded weights, in this thread."""

    def __init__(self, model: torch.nn.Module, bits: int) -> None:
        super().__init__()
        linears = [each for each in model.modules() if isinstance(each, torch.nn.Linear)]
        self._own: dict[int, Rounded] = {}
        self._places: dict[int, int] = {}
        weights = {id(each.weight): each.weight.detach() for each in linears if each.weight.ndim == 2}
        first = next(iter(weights.values()), torch.empty(0, device="meta"))
        self._kernels: Any = None
        if first.device.type == "cpu" and first.dtype in (torch.float32, torch.bfloat16) and why_unavailable() is None:
            self._kernels = load_kernels()
            self._handle = self._kernels.new_module()
            weakref.finalize(self, free_module(), int(self._handle)).atexit = False
        for name, weight in weights.items():
            if weight.is_meta:
                continue
            own = rounded(weight, bits)
            if self._kernels is None:
                self._own[name] = own
            else:
                self._places[name] = len(self._places)
                self._kernels.add_weight(self._handle, own.values, None, own.scale)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is not torch.nn.functional.linear:
            return func(*args, **(kwargs or {}))
        source, weight = args[:2]
        bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
        if (place := self._places.get(id(weight))) is not None and source.dtype == weight.dtype:
            out = self._kernels.linear(source, self._handle, place, len(weight))
            return out if bias is None else out + bias
        if (own := self._own.get(id(weight))) is not None:
            return func(source, own.dense(weight.dtype), bias)
        return func(*args, **(kwargs or {}))
