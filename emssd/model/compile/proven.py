"""`ProvenProgram`: a program that is kept on disk, and taken only if it computes the same as its module."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from emssd.errors import CompileError, EmssdError
from emssd.errors.faults import described
from emssd.model.compile import program, tracing
from emssd.model.compile.fingerprint import UnnamedError
from emssd.model.compile.program import Program, declare_operators
from emssd.native import CacheError, Entry, NativeError, entry, is_kept

__all__ = ["NotKeptError", "ProvenProgram", "sources"]

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


def sources(*files: str) -> list[str]:
    """The code of `files` and of the modules that make programs."""
    return [Path(file).read_text() for file in (*files, __file__, tracing.__file__, program.__file__)]
