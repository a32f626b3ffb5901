"""Builds the C++ kernels in ``cpp``, each part once for each machine and version of PyTorch."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from emssd.errors import EmssdError
from emssd.native.cache import CacheError, entry, room_hint

_SOURCES = Path(__file__).with_name("cpp")
_PARTS = ("library", "attention", "choice", "packed", "linear", "recurrence")  # the slowest to build first
_LIBRARY = "emssd_native.so"
_OPERATORS = ("argmax", "sample", "attend_layer", "move", "linear", "plain_linear", "packed_linear", "add_weight",
              "run_program")  # fmt: skip
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-march=native", "-fopenmp")
_FLAGS_OF = dict.fromkeys(_PARTS, _FLAGS) | {"library": ("-std=c++20", "-O1", *_FLAGS[2:])}  # which computes nothing

logger = logging.getLogger("emssd")


class NativeError(EmssdError):
    """The C++ kernels cannot be built or loaded here; the message says why."""

    def __init__(self, message: str, short: str) -> None:
        super().__init__(message)
        self.short = short


def load_kernels() -> Any:
    """The operators ``torch.ops.emssd_native``, built if need be, in about 15 seconds.

    Raises NativeError: there is no compiler, or it fails.
    """
    if (failure := _load()) is not None:
        raise NativeError(str(failure), failure.short)
    return torch.ops.emssd_native


def loaded_kernels() -> Any | None:
    """The operators, if something has loaded them already; nothing is built."""
    return torch.ops.emssd_native if _load.cache_info().currsize and _load() is None else None


def why_unavailable() -> str | None:
    """The reason why there can be no kernels here, or ``None``; builds them if need be."""
    failure = _load()
    return None if failure is None else str(failure)


def fallback_reason() -> str | None:
    """In a few words, what runs in the place of the kernels and why; ``None`` unless they were needed and failed."""
    failure = _load() if _load.cache_info().currsize else None
    return None if failure is None else f"attention in PyTorch: {failure.short}"


@cache
def free_module() -> Callable[[int], None]:
    """The function that frees the module of a handle. It is no operator: finalizers may call it at any point."""
    import ctypes

    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(load_kernels().free_module_address())


def kernels_key() -> str:
    """A key of these sources, PyTorch and processor, for names of files."""
    return hashlib.sha256(" ".join(map(_part_key, _PARTS)).encode()).hexdigest()[:16]


def compiler() -> str | None:
    """Path of the C++ compiler, ``$CXX`` or the first of the usual names; ``None`` if there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


@cache
def _load() -> NativeError | None:
    """Load the library of this machine, once in a process. Returns the failure, if there was one."""
    try:
        if sys.platform != "linux":
            raise NativeError("the C++ kernels are written for Linux, and this is another system", "not Linux")
        for replace in (False, True):  # as another library that it needs may be gone
            folder = entry("kernels", kernels_key(), _build, replace=replace).folder
            if _loads(folder / _LIBRARY):
                return None
        reason = f"{folder / _LIBRARY} does not hold the C++ kernels; delete {folder}"
        raise NativeError(reason, "a broken library")
    except CacheError as error:
        return NativeError(f"there is no place for the C++ kernels: {error}", "the cache cannot be used")
    except NativeError as error:
        return error


def _loads(library: Path) -> bool:
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]  # not annotated
        return all(hasattr(torch.ops.emssd_native, name) for name in _OPERATORS)
    except OSError as error:
        logger.warning("%s cannot be loaded (%s)", library, error)
        return False


def _processor() -> str:
    """The features that ``-march=native`` depends on."""
    cpuinfo = Path("/proc/cpuinfo")  # there is none outside of Linux
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _part_key(part: str) -> str:
    """A key of the sources, flags, PyTorch and processor of one part."""
    parts = [_text(f"{part}.cpp"), torch.__version__, *_FLAGS_OF[part], _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _text(name: str) -> str:
    """A source and its own headers."""
    text = (_SOURCES / name).read_text()
    return "\0".join([text, *map(_text, re.findall(r'^#include "(.+)"', text, re.MULTILINE))])


def _build(folder: Path) -> None:
    """Compile the parts that are not kept, and link all into `folder`."""
    if (tool := compiler()) is None:
        raise NativeError("there is no C++ compiler on PATH (tried $CXX, c++, g++, clang++)", "no C++ compiler")
    logger.info("building kernels for this processor, once; this takes about 15 s …")
    home = Path(torch.__file__).parent

    def compiled(part: str) -> str:
        def write(target: Path) -> None:
            options = *_FLAGS_OF[part], f"-isystem{home / 'include'}", "-c", str(_SOURCES / f"{part}.cpp")
            _run(tool, *options, "-o", str(target / "part.o"))

        return str(entry("objects", _part_key(part), write).folder / "part.o")

    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            objects = list(threads.map(compiled, _PARTS))
        libraries = f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", _openmp()
        _run(tool, "-shared", *objects, "-o", str(folder / _LIBRARY), *libraries)
    except (RuntimeError, OSError) as error:
        reason = f"building the C++ kernels failed: {_complaint(error)}{room_hint(error)}"
        raise NativeError(reason, "the build failed") from error


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"{command[0]} ended with status {done.returncode}")


def _openmp() -> str:
    """Link against the OpenMP that PyTorch has loaded: a second one would bring threads of its own."""
    import psutil

    loaded = sorted({mapped.path for mapped in psutil.Process().memory_maps()})
    names = ("libgomp", "libomp", "libiomp5")
    return next((path for path in loaded if Path(path).name.startswith(names)), "-fopenmp")


def _complaint(error: BaseException) -> str:
    """The compiler's first complaint, else the first line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    full = [line for line in lines if "No space left" in line]  # the linker's error does not say so
    errors = full or [line for line in lines if re.search(r"\berror: ", line)]
    return (errors or lines or [type(error).__name__])[0].strip()
