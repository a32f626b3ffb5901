"""`model.compile` on a CPU: the model's forward pass as one compiled program, kept on disk for later runs.

Transformers' own forward is traced once by `torch.export`, with attention as an opaque operator and with linear layers
that share their input joined into one; Inductor compiles the rest ahead of time. The number of tokens stays free.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from emssd.errors import CompileError
from emssd.model.compile import tracing
from emssd.model.compile.fingerprint import fingerprint, refuse_hooks, short_pass
from emssd.model.compile.program import Program
from emssd.model.compile.proven import NotKeptError, ProvenProgram, sources
from emssd.model.compile.tracing import has_kernel, in_one_row
from emssd.model.hf import hooked, interface
from emssd.model.hf.probe import PROBE_TOLERANCE

if TYPE_CHECKING:
    from emssd.attention import NativeStep
    from emssd.model.hf.hooked import HookedModel
    from emssd.model.hf.interface import Attend
    from emssd.model.hf.streams import Hidden

__all__ = ["CompiledForward", "NotKeptError"]


class CompiledForward(ProvenProgram):
    """The compiled forward pass of a model, which also gives the `hidden` states of these indices.

    The model is left as it was; its linear weights are copied in the layout of their kernel. Raises CompileError as
    `ProvenProgram` does, and for another device, or attention sinks.
    """

    kind = "models"

    def __init__(self, target: HookedModel, hidden: tuple[int, ...] = (), *, only_kept: bool = False) -> None:
        if target.device.type != "cpu":
            raise CompileError(f"model.compile is for CPUs, and the model is on {target.device}")
        if any(layer.sinks is not None for layer in target.layers):
            raise CompileError(f"{type(target.model).__name__} has attention sinks, which no program is made with")
        self._target, self.hidden = target, hidden
        super().__init__(target.model, only_kept=only_kept)

    def reread(self) -> bool:
        """Copy the weights as they are now. Returns whether this still is the program of the model."""
        return self._why_wrong(self._target.model, self._files, self.expected()) is None

    def key(self) -> str:
        refuse_hooks(self._target.model)
        code = sources(__file__, hooked.__file__, interface.__file__)
        return fingerprint(self._target.model, (str(self._target.layers), str(self.hidden), *code))

    def expected(self) -> Seq[torch.Tensor]:
        return short_pass(self._target, self._target.run, self.hidden)

    def compile(self, folder: Path) -> None:
        tracing.compile_program(self._target, folder, self.hidden)

    def outputs(self) -> Seq[tuple[str, torch.Tensor, float]]:
        names, most = ["logits", *(f"hidden states {k}" for k in self.hidden)], PROBE_TOLERANCE[self._target.dtype]
        values = short_pass(self._target, self, self.hidden)
        return [(name, value, most) for name, value in zip(names, values, strict=True)]

    @property
    def why_not_invariant(self) -> str | None:
        if not has_kernel(self._target.dtype):
            return f"oneDNN or MKL computes the {self._target.dtype} layers of its program"
        others = ", ".join(self._program.other_products)
        return f"its program calls {others}" if others else None

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attend: Attend,
        logits_to_keep: torch.Tensor,
        *,
        hidden: Hidden | None = None,
        step: NativeStep | None = None,
    ) -> torch.Tensor:
        """Like `HookedModel.run`: ``[b, n]`` tokens in, logits ``[b, m, vocab]`` out, `hidden` filled.

        `step` does what `attend` does, where C++ code can do it.
        """
        batch, num_tokens = input_ids.shape
        logits_to_keep = in_one_row(logits_to_keep, batch, num_tokens)
        layers = self._target.layers
        inputs = [input_ids.view(1, -1), position_ids.view(1, -1), logits_to_keep]

        def attend_layer(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return attend(layer, layers[layer], query, key, value)

        logits, *states = self._program(inputs, attend_layer, step)
        for index, values in zip(self.hidden, states, strict=True):
            if hidden is not None and index in hidden:
                hidden[index] = values.view(batch, num_tokens, -1)
        return logits.view(batch, -1, logits.shape[-1])

    def with_weights(self, bits: int) -> CompiledForward:
        """The same program with the model's linear weights rounded to 4 or 8 bits."""
        other = copy.copy(self)
        other._program = Program(self._files, self._target.model, bits)
        return other
