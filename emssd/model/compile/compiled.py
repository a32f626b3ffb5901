"""`model.compile` on a CPU: the model's forward pass as one compiled program.

A `ProvenProgram` is kept on disk for later runs, and taken only if it computes the same as its module.
Transformers' own forward is traced once by `torch.export`, with attention as an opaque operator and with linear layers
that share their input joined into one; Inductor compiles the rest ahead of time. The number of tokens stays free.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from emssd.errors import CompileError, EmssdError
from emssd.errors.faults import described
from emssd.model.compile import program, tracing
from emssd.model.compile.fingerprint import UnnamedError, fingerprint, refuse_hooks, short_pass
from emssd.model.compile.program import Program, declare_operators
from emssd.model.compile.tracing import has_kernel, in_one_row
from emssd.model.hf import hooked, interface
from emssd.model.hf.probe import PROBE_TOLERANCE
from emssd.native import CacheError, Entry, NativeError, entry, is_kept

if TYPE_CHECKING:
    from emssd.attention import NativeStep
    from emssd.model.hf.hooked import HookedModel
    from emssd.model.hf.interface import Attend
    from emssd.model.hf.streams import Hidden

__all__ = ["CompiledForward", "NotKeptError", "ProvenProgram", "sources"]

logger = logging.getLogger("emssd")


class NotKeptError(CompileError):
    """No earlier run has left a program of this module."""


class ProvenProgram(ABC):
    """The compiled program of one module, on a CPU. The module must stay as it is, as the program reads its tensors.

    A program on disk may be another module's or damaged. So it is compared with the module on a short pass, and
    compiled once more if it differs. A module with code of no library has no key: its program is for this process.

    Attributes:
        origin: in words, where the program comes from.

    Raises:
        NotKeptError: no earlier run has left one, and `only_kept` compiles nothing.
        CompileError: there is no C++ compiler or no safe cache, or the module cannot be traced, or its program differs.
    """

    kind: str
    """The name of the folder of such programs."""

    def __init__(self, module: torch.nn.Module, *, only_kept: bool = False) -> None:
        self.origin = "just now, for later runs too"
        try:
            try:
                key: str | None = self.key()
            except UnnamedError as error:
                key, self.origin = None, f"just now, for this process alone: {error}"
            if only_kept and (key is None or not is_kept(self.kind, key)):  # before kernels are built
                raise NotKeptError("no program of it is kept")
            expected = self.expected()

            def write(folder: Path) -> None:
                if only_kept:
                    raise NotKeptError("the program of it that is kept is damaged")
                self.compile(folder)

            declare_operators()
            files = self._entry(key, write)
            wrong = self._why_wrong(module, files, expected)
            if wrong is not None and not files.new:
                logger.warning("%s is not the program of this model (%s), and is compiled again", files.folder, wrong)
                files = self._entry(key, write, replace=True)
                wrong = self._why_wrong(module, files, expected)
            if wrong is not None:
                why = f"is not the program of this model, though it was just compiled: {wrong}"
                raise CompileError(f"{files.folder} {why}")
        except (NativeError, CacheError) as error:
            raise CompileError(str(error)) from error
        except EmssdError:
            raise
        except Exception as error:  # a module's own code may raise anything
            raise CompileError(f"{type(module).__name__} cannot be compiled: {described(error)}") from error
        self.folder, self._files = files.folder, files
        self.origin = self.origin if files.new else "its program was kept"

    def _entry(self, key: str | None, write: Callable[[Path], None], *, replace: bool = False) -> Entry:
        if key is not None:
            return entry(self.kind, key, write, replace=replace)
        self._scratch = TemporaryDirectory(prefix="emssd-program-")  # which goes with this
        folder = Path(self._scratch.name)
        write(folder)
        return Entry(folder, new=True)

    @abstractmethod
    def key(self) -> str:
        """A name for what the program depends on, see `emssd.model.compile.fingerprint`."""

    @abstractmethod
    def expected(self) -> Seq[torch.Tensor]:
        """The outputs of the module itself for a short pass."""

    @abstractmethod
    def compile(self, folder: Path) -> None:
        """Compile the module into `folder`."""

    @abstractmethod
    def outputs(self) -> Seq[tuple[str, torch.Tensor, float]]:
        """The program's outputs for the short pass: names, values, and the standard deviations that they may be off."""

    def _why_wrong(self, module: torch.nn.Module, files: Entry, expected: Seq[torch.Tensor]) -> str | None:
        """Load the `files`. Returns why they are not the program; reading others raises almost anything."""
        vars(self).pop("_program", None)  # its weights go before there are others
        try:
            self._program = Program(files, module)
            for (name, value, most), right in zip(self.outputs(), expected, strict=True):
                far = float((value.double() - right.double()).abs().max() / right.double().std().clamp_min(1e-12))
                if not far <= most:  # also NaN
                    return f"its {name} differ by {far:.3g} standard deviations"
        except Exception as error:
            return described(error)
        return None


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
        code = sources(hooked.__file__, interface.__file__)
        return fingerprint(self._target.model, (str(self._target.layers), str(self.hidden), *code))

    def expected(self) -> Seq[torch.Tensor]:
        return short_pass(self._target, self._target.run, self.hidden)

    def compile(self, folder: Path) -> None:
        tracing.compile_program(self._target, folder, self.hidden)

    def outputs(self) -> Seq[tuple[str, torch.Tensor, float]]:
        names, most = ["logits", *(f"hidden states {k}" for k in self.hidden)], PROBE_TOLERANCE[self._target.precision]
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
        layers, inputs = self._target.layers, [input_ids.view(1, -1), position_ids.view(1, -1), logits_to_keep]
        logits, *states = self._program(inputs, lambda layer, *qkv: attend(layer, layers[layer], *qkv), step)
        for index, values in zip(self.hidden, states, strict=True):
            if hidden is not None and index in hidden:
                hidden[index] = values.view(batch, num_tokens, -1)
        return logits.view(batch, -1, logits.shape[-1])

    def with_weights(self, bits: int) -> CompiledForward:
        """The same program with the model's linear weights rounded to 4 or 8 bits."""
        other = copy.copy(self)
        other._program = Program(self._files, self._target.model, bits)
        return other


def sources(*files: str) -> list[str]:
    """The code of `files` and of the modules that make programs."""
    return [Path(file).read_text() for file in (*files, __file__, tracing.__file__, program.__file__)]
