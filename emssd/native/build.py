"""Builds `kernels.cpp` through PyTorch's extension builder, once for each machine and version of PyTorch."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from emssd.errors import EmssdError
from emssd.native.cache import CacheError, Entry, entry, room_hint

__all__ = [
    "NativeError",
    "fallback_reason",
    "free_module",
    "kernels_key",
    "load_kernels",
    "loaded_kernels",
    "why_unavailable",
]

_SOURCE = Path(__file__).with_name("kernels.cpp")
_LIBRARY = "emssd_native.so"
_OPERATORS = ("argmax", "sample", "attend", "move", "linear", "new_module", "add_weight", "run_step")
_FLAGS = ("-O3", "-march=native", "-fopenmp")

logger = logging.getLogger("emssd")


class NativeError(EmssdError):
    """The C++ kernels cannot be built or loaded here; the message says why.

    Attributes:
        short: why, in a few words.
    """

    def __init__(self, message: str, short: str) -> None:
        super().__init__(message)
        self.short = short


def load_kernels() -> Any:
    """The operators ``torch.ops.emssd_native``, built if need be (some 20 seconds, said beforehand).

    Raises:
        NativeError: there is no compiler, or it fails.
    """
    if (failure := _load()) is not None:
        raise NativeError(str(failure), failure.short)
    return torch.ops.emssd_native


def loaded_kernels() -> Any | None:
    """The operators, if something has loaded them already; nothing is built."""
    return torch.ops.emssd_native if _load.cache_info().currsize and _load() is None else None


def why_unavailable() -> str | None:
    """Why the kernels cannot be had here, in words, or ``None``; builds them if that was not done yet."""
    failure = _load()
    return None if failure is None else str(failure)


def fallback_reason() -> str | None:
    """In a few words, what runs in the place of the kernels and why; ``None`` if nothing that asked for them must."""
    failure = _load() if _load.cache_info().currsize else None
    return None if failure is None else f"attention in PyTorch: {failure.short}"


@cache
def free_module() -> Callable[[int], None]:
    """What frees the module of a handle. It is no operator: finalizers may call it at any point."""
    import ctypes

    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(load_kernels().free_module_address())


def kernels_key() -> str:
    """What stands for this source, PyTorch and processor in names of files."""
    parts = [_SOURCE.read_bytes(), torch.__version__.encode(), str(_FLAGS).encode(), _processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def compiler() -> str | None:
    """Path of the C++ compiler, ``$CXX`` or the first of the usual names; ``None`` if there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


@cache
def _load() -> NativeError | None:
    """Load the library of this machine, once in a process; what went wrong is remembered too."""
    try:
        if sys.platform != "linux":
            raise NativeError("the C++ kernels are written for Linux, and this is another system", "not Linux")
        if _loads(library := entry("kernels", kernels_key(), _build)):
            return None
        if library.new or not _loads(library := entry("kernels", kernels_key(), _build, replace=True)):
            reason = f"{library.folder / _LIBRARY} does not hold the C++ kernels; delete {library.folder}"
            raise NativeError(reason, "a broken library")
    except CacheError as error:
        return NativeError(f"there is no place for the C++ kernels: {error}", "the cache cannot be used")
    except NativeError as error:
        return error
    return None


def _loads(library: Entry) -> bool:
    """Load the library, unless it was built by this process; returns whether the operators are there then."""
    try:
        if not library.new:
            torch.ops.load_library(str(library.folder / _LIBRARY))  # type: ignore[no-untyped-call]  # not annotated
        return all(hasattr(torch.ops.emssd_native, name) for name in _OPERATORS)
    except OSError as error:
        logger.warning("%s cannot be loaded (%s)", library.folder / _LIBRARY, error)
        return False


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _build(folder: Path) -> None:
    """Compile into `folder`, and load."""
    if compiler() is None:
        reason = "there is no C++ compiler on PATH (tried $CXX, c++, g++, clang++)"
        raise NativeError(reason, "no C++ compiler")
    if shutil.which("ninja") is None and not _add_ninja():
        raise NativeError("building the C++ kernels needs ninja: pip install ninja", "no ninja")
    logger.info("building kernels for this processor, once; this takes about 20 s …")
    scratch = folder / "build"
    try:
        from torch.utils import cpp_extension

        scratch.mkdir()
        cpp_extension.load(
            name="emssd_native",
            sources=[str(_SOURCE)],
            extra_cflags=list(_FLAGS),
            extra_ldflags=_openmp(),
            build_directory=str(scratch),
            is_python_module=False,
        )
        (scratch / _LIBRARY).rename(folder / _LIBRARY)
        shutil.rmtree(scratch)
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        reason = f"building the C++ kernels failed: {_complaint(error)}{room_hint(error)}"
        raise NativeError(reason, "the build failed") from error


def _add_ninja() -> bool:
    """Put the ``ninja`` of this environment on PATH, for interpreters that run without their environment active."""
    folder = Path(sys.executable).parent
    if not (folder / "ninja").exists():
        return False
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    return True


def _openmp() -> list[str]:
    """Link against the OpenMP that PyTorch has loaded: a second one would bring threads of its own."""
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    except OSError:
        return ["-fopenmp"]
    loaded = sorted(path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp5")))
    return [loaded[0]] if loaded else ["-fopenmp"]


def _complaint(error: BaseException) -> str:
    """The compiler's first complaint, else the first line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    # ninja's own lines say "Error building", and the linker's error does not say that the disk is full
    full = [line for line in lines if "No space left" in line]
    errors = full or [line for line in lines if re.search(r"\berror: ", line)]
    return (errors or lines or [type(error).__name__])[0].strip()
