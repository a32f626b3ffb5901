"""`model.compile` on a CPU: the model's forward pass as one compiled program, kept on disk for later runs.

Transformers' own forward is traced once by `torch.export`, with attention as an opaque operator and with linear layers
that share their input joined into one; Inductor compiles the rest ahead of time. The number of tokens stays free.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from emssd.errors import CompileError, EmssdError
from emssd.model import program, tracing
from emssd.model.fingerprint import fingerprint, short_pass
from emssd.model.probe import PROBE_TOLERANCE
from emssd.model.program import Chain, Program, declare_operators
from emssd.model.proven import difference, proven
from emssd.native import CacheError, Entry, NativeError, is_kept

if TYPE_CHECKING:
    from emssd.attention import StepPlan
    from emssd.attention.native import NativeStep
    from emssd.model.hooked import HookedModel
    from emssd.model.interface import Attend
    from emssd.model.streams import Hidden

__all__ = ["CompileError", "CompiledForward", "NotKeptError"]


class NotKeptError(CompileError):
    """No earlier run has left a program of this model."""


class CompiledForward:
    """The compiled forward pass of one model.

    Args:
        target: the model, on a CPU. It is left as it was; its linear weights are copied in the layout of their kernel.
            It must stay as it is, see `emssd.model.guard`.
        hidden: indices of the hidden states that the program gives beside logits, see `emssd.model.streams.Streams`.
        only_kept: take a program that an earlier run has left, and compile nothing.

    Attributes:
        folder: where the program is kept.
        is_new: whether it was compiled just now.

    Raises:
        NotKeptError: there is none, and `only_kept`.
        CompileError: another device, no C++ compiler, a cache that others can write, a model that cannot be traced or
            that a later run could not recognise, or a program that computes something else.
    """

    def __init__(self, target: HookedModel, hidden: tuple[int, ...] = (), *, only_kept: bool = False) -> None:
        self.hidden = hidden
        if target.device.type != "cpu":
            raise CompileError(f"model.compile is for CPUs, and the model is on {target.device}")
        if any(layer.sinks is not None for layer in target.layers):
            raise CompileError(f"{type(target.model).__name__} has attention sinks, which no program is made with")
        try:
            key, right = _fingerprint(target, hidden)
            if only_kept and not is_kept("models", key):  # before kernels are built that may not be needed
                raise NotKeptError("no program of it is kept")
            declare_operators()
            self._layers = target.layers
            self._open(target, key, right, only_kept=only_kept)
        except (NativeError, CacheError) as error:
            raise CompileError(str(error)) from error
        except EmssdError:
            raise
        except Exception as error:  # a model's own code may raise anything
            reason = f"{type(error).__name__}: {tracing.first_line(error)}"
            raise CompileError(f"{type(target.model).__name__} cannot be compiled: {reason}") from error

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

        `step` is what `attend` does, where C++ code can do it.
        """
        batch, num_tokens = input_ids.shape
        if batch > 1:  # the program takes one row of tokens, and only `attend` knows where rows begin
            starts = torch.arange(0, batch * num_tokens, num_tokens).unsqueeze(1)
            logits_to_keep = (starts + logits_to_keep).flatten()
        num_logits, layers = logits_to_keep.numel(), self._layers
        inputs = [input_ids.view(1, -1), position_ids.view(1, -1), logits_to_keep]
        if self._program.few_sizes:
            inputs = [_filled(each) for each in inputs]

        def attend_layer(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return attend(layer, layers[layer], query, key, value)

        logits, *states = self._program(inputs, attend_layer, batch * num_tokens, step)
        for index, each in zip(self.hidden, states, strict=True):
            if hidden is not None and index in hidden:
                hidden[index] = each[:, : batch * num_tokens].view(batch, num_tokens, -1)
        return logits[:, :num_logits].view(batch, -1, logits.shape[-1])

    def run_chain(self, plan: StepPlan, step: NativeStep, lengths: Seq[int], vocab_size: int) -> torch.Tensor | None:
        """See `emssd.model.runner.ModelRunner.run_chain`; `plan` is by `AttentionBackend.plan_chain`, `step` of it."""
        if self._program.few_sizes:
            return None
        inputs = [plan.input_ids, plan.position_ids, plan.logits_to_keep]
        return self._program.run_chain(inputs, step, Chain([*lengths], vocab_size))[0]

    def _open(self, target: HookedModel, key: str, right: list[torch.Tensor], *, only_kept: bool) -> None:
        """Load the program of that key, once more compiled if what is there is not the model's."""

        def write(folder: Path) -> None:
            if only_kept:
                raise NotKeptError("the program of it that is kept is damaged")
            tracing.compile_program(target, folder, self.hidden)

        found = proven("models", key, write, lambda found: self._why_wrong(target, found, right))
        self.folder, self.is_new = found.folder, found.new

    def _why_wrong(self, target: HookedModel, found: Entry, right: list[torch.Tensor]) -> str | None:
        """Load what was found, and compare its logits and hidden states with the model's, `right`."""
        vars(self).pop("_program", None)  # its weights go before there are others
        self._program = Program(found, target.model)
        pairs = zip(short_pass(target, self, self.hidden), right, strict=True)
        for name, pair in zip(["logits", *(f"hidden states {k}" for k in self.hidden)], pairs, strict=True):
            if not (far := difference(*pair)) <= PROBE_TOLERANCE[target.dtype]:
                return f"its {name} differ by {far:.3g} standard deviations"
        return None


def _fingerprint(target: HookedModel, hidden: tuple[int, ...]) -> tuple[str, list[torch.Tensor]]:
    return fingerprint(
        target, [Path(file).read_text() for file in (__file__, program.__file__, tracing.__file__)], hidden
    )


def _filled(values: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` integers, with zeros up to one of few sizes: oneDNN makes a program for each size that it meets."""
    size = values.shape[-1]
    step = 1 if size <= 8 else 4 if size <= 128 else 32
    return torch.nn.functional.pad(values, (0, -size % step)) if size % step else values
