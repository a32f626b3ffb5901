"""`ProvenProgram`: a compiled program of a module that is kept on disk, and is taken only if it computes the same."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from emssd.errors import CompileError, EmssdError
from emssd.model import program, tracing
from emssd.model.program import Program, declare_operators
from emssd.native import CacheError, Entry, NativeError, entry, is_kept

__all__ = ["NotKeptError", "ProvenProgram", "in_one_row", "sources"]

logger = logging.getLogger("emssd")


class NotKeptError(CompileError):
    """No earlier run has left a program of this module."""


class ProvenProgram(ABC):
    """The compiled program of one module, on a CPU.

    A program that is found on disk may be another module's or damaged. So it is compared with the module on a short
    pass, and compiled once more if it differs.

    Args:
        module: whose tensors the program reads. It must stay as it is.
        only_kept: take a program that an earlier run has left, and compile nothing.

    Attributes:
        folder: where the program is kept.
        is_new: whether it was compiled just now.

    Raises:
        NotKeptError: there is none, and `only_kept`.
        CompileError: no C++ compiler, a cache that others can write, a module that cannot be traced or that a later run
            could not recognise, or a program that computes something else.
    """

    kind: str
    """The name of the folder of such programs."""

    def __init__(self, module: torch.nn.Module, *, only_kept: bool = False) -> None:
        try:
            key, right = self.expected()
            if only_kept and not is_kept(self.kind, key):  # before kernels are built that may not be needed
                raise NotKeptError("no program of it is kept")

            def write(folder: Path) -> None:
                if only_kept:
                    raise NotKeptError("the program of it that is kept is damaged")
                self.compile(folder)

            declare_operators()
            found = entry(self.kind, key, write)
            wrong = self._why_wrong(module, found, right)
            if wrong is not None and not found.new:
                logger.warning("%s is not the program of this model (%s), and is compiled again", found.folder, wrong)
                found = entry(self.kind, key, write, replace=True)
                wrong = self._why_wrong(module, found, right)
            if wrong is not None:
                raise CompileError(
                    f"{found.folder} is not the program of this model, though it was just compiled: {wrong}"
                )
        except (NativeError, CacheError) as error:
            raise CompileError(str(error)) from error
        except EmssdError:
            raise
        except Exception as error:  # a module's own code may raise anything
            reason = f"{type(error).__name__}: {tracing.first_line(error)}"
            raise CompileError(f"{type(module).__name__} cannot be compiled: {reason}") from error
        self.folder, self.is_new, self._found = found.folder, found.new, found

    @abstractmethod
    def expected(self) -> tuple[str, Seq[torch.Tensor]]:
        """A name for what the program depends on, and what the module itself gives for a short pass."""

    @abstractmethod
    def compile(self, folder: Path) -> None:
        """Compile the module into `folder`."""

    @abstractmethod
    def outputs(self) -> Seq[tuple[str, torch.Tensor, float]]:
        """The program's outputs for the short pass: names, values, and the standard deviations each may be off."""

    def _why_wrong(self, module: torch.nn.Module, found: Entry, right: Seq[torch.Tensor]) -> str | None:
        """Load what was found. Returns why it is not the program; reading something else raises almost anything."""
        vars(self).pop("_program", None)  # its weights go before there are others
        try:
            self._program = Program(found, module)
            for (name, value, most), wanted in zip(self.outputs(), right, strict=True):
                got, wanted = value.double(), wanted.double()
                far = float((got - wanted).abs().max() / wanted.std().clamp_min(1e-12))
                if not far <= most:  # also NaN
                    return f"its {name} differ by {far:.3g} standard deviations"
        except Exception as error:
            return f"{type(error).__name__}: {tracing.first_line(error)}"
        return None


def sources(*files: str) -> list[str]:
    """The code of `files` and of what else makes programs."""
    return [Path(file).read_text() for file in (*files, __file__, program.__file__, tracing.__file__)]


def in_one_row(kept: torch.Tensor, batch: int, num_tokens: int) -> torch.Tensor:
    """The places ``[batch * m]`` of tokens to keep, ``[m]`` in each of `batch` rows, once rows are put together.

    A program takes one row of tokens. Only attention needs to know where rows begin.
    """
    starts = torch.arange(0, batch * num_tokens, num_tokens).unsqueeze(1)
    return (starts + kept).flatten() if batch > 1 else kept
