"""`RoundedRunner`: the target with its linear weights rounded to 4 or 8 bits, on the KV cache of the target itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from emssd.attention import PackedInputs, StepPlan
from emssd.errors import ConfigError
from emssd.model.compile.packed import PackedLinear, Rounded, has_packed_kernel, panels_of, rounded_linear
from emssd.model.run.runner import CausalLMRunner, ModelOutput
from emssd.model.run.target import Computed, TargetModel

__all__ = ["RoundedRunner"]


class RoundedRunner(CausalLMRunner):
    """Runs steps of a model with rounded linear weights, and shares the KV cache of the runner it is attached to.

    It reads the KV that the target has committed, and writes to the slots after it. The target's next step writes these
    before it reads them, so there is nothing to commit, to release or to catch up with. All but the linear weights is
    the target's own, also its compiled program. The weights are rounded again when the model was renewed.

    Args:
        model: the target.
        bits: 4 or 8, in groups of 32 inputs.
        num_layers: only so many of the first layers are run, uncompiled; ``None`` for all.

    Attributes:
        is_attached: whether there is a KV cache to share.

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
        self.is_attached = False
        self._made_of: tuple[int, Any] = -1, None  # renewals of the model when it was rounded, and its program
        self._weights: RoundedWeights | None = None
        self._program: Any = None

    def attach(self, runner: CausalLMRunner) -> None:
        """Share the KV cache of `runner`, which runs the same model, and round the weights."""
        self.backend, self._states, self.is_attached = runner.backend, runner._states, True
        self._follow()

    def run(self, packed: PackedInputs) -> ModelOutput:
        self._follow()
        return super().run(packed)

    def _compute(self, plan: StepPlan) -> Computed:
        plan = replace(plan, replay=None)  # a recorded pass reads the target's own weights
        program = self._program or (lambda *args, step, **kwargs: self.model.run(*args, **kwargs))
        with nullcontext() if self._weights is None else self._weights:
            return self.model(plan, self.backend, (), self.num_layers, program)

    def _follow(self) -> None:
        """Round the weights again if the model was renewed."""
        compiled = self.model.compiled if self.num_layers is None else None
        if self._made_of[0] != self.model.num_renewals or self._made_of[1] is not compiled:
            self._weights = self._program = None  # memory first
            self._made_of = -1, None
            if compiled is not None:
                self._program = compiled.with_weights(self.bits)
            else:
                self._weights = RoundedWeights(self.model.model, self.bits)
            self._made_of = self.model.num_renewals, compiled


class RoundedWeights(TorchFunctionMode):
    """Within, each `torch.nn.Linear` of a model computes with rounded weights, in this thread."""

    def __init__(self, model: torch.nn.Module, bits: int) -> None:
        super().__init__()
        self._dense: dict[int, Rounded] = {}  # without kernels
        self._panels: dict[int, torch.Tensor] = {}
        for layer in model.modules():
            if not isinstance(layer, torch.nn.Linear) or layer.weight.ndim != 2 or layer.weight.is_meta:
                continue
            name = id(layer.panels if isinstance(layer, PackedLinear) else layer.weight)
            if name in self._dense or name in self._panels:
                continue
            copy = rounded_linear(layer, bits)
            if has_packed_kernel(layer.weight):
                self._panels[name] = panels_of(copy)
            else:
                self._dense[name] = copy

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        packed_linear: Any = torch.ops.emssd_native.packed_linear.default if self._panels else None
        if func is packed_linear and (panels := self._panels.get(id(args[1]))) is not None:
            return func(args[0], panels, *args[2:])
        if func is not torch.nn.functional.linear:
            return func(*args, **(kwargs or {}))
        source, weight = args[:2]
        bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
        if (panels := self._panels.get(id(weight))) is not None and source.dtype == weight.dtype:
            return packed_linear(source, panels, bias, len(weight))
        if (copy := self._dense.get(id(weight))) is not None:
            return func(source, copy.dense(weight.dtype), bias)
        return func(*args, **(kwargs or {}))
