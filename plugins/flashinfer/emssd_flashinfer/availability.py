"""Finds out whether FlashInfer's kernels can run on this machine. The cheap questions come first."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

__all__ = ["reason"]

KNOWN_VERSIONS = ("0.6.18", "0.7.0")
"""The first version of flashinfer-python that this plugin knows, and the first later one that it does not know."""

_INSTALL = "pip install 'emssd[flashinfer]' brings it"
_MODULES = ("flashinfer", "tvm_ffi", "pynvml", "requests", "packaging", "tqdm")  # what importing it truly needs


def reason() -> str | None:
    """The reason why the kernels cannot run here, without a full stop; ``None`` if they can.

    Only the last question starts CUDA, and none imports FlashInfer.
    """
    import torch

    if torch.version.cuda is None:
        return f"it needs an NVIDIA GPU, and this PyTorch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "it needs an NVIDIA GPU, and PyTorch finds none on this machine"
    if missing := _package() or _compiler():
        return missing
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        name = torch.cuda.get_device_name()
        return f"it needs a GPU of compute capability 8.0 or later, and {name} has {capability[0]}.{capability[1]}"
    return None


def _package() -> str | None:
    missing = [module for module in _MODULES if find_spec(module) is None]
    if "flashinfer" in missing:
        return f"FlashInfer is not installed ({_INSTALL})"
    if missing:
        return f"FlashInfer is installed without {', '.join(missing)}, which it imports ({_INSTALL})"
    try:
        installed = version("flashinfer-python")
    except PackageNotFoundError:
        return f"FlashInfer is not installed as flashinfer-python, so its version is unknown ({_INSTALL})"
    first, beyond = KNOWN_VERSIONS
    if not Version(first) <= Version(Version(installed).base_version) < Version(beyond):
        return (
            f"FlashInfer {installed} is installed, and this version of emssd knows {first} up to, but not including, "
            f"{beyond} ({_INSTALL})"
        )
    return None


def _compiler() -> str | None:
    """The tool that is missing to compile kernels when they are first used. FlashInfer searches the same places."""
    cache = find_spec("flashinfer_jit_cache")
    for folder in [] if cache is None else cache.submodule_search_locations or []:
        if any(Path(folder).glob("**/batch_prefill*.so")):
            return None  # compiled kernels are there; later versions of this package bring none
    if shutil.which("ninja") is None:
        return "FlashInfer compiles its kernels when they are first used, and ninja is not on PATH (pip install ninja)"
    cxx = os.environ.get("CXX", "c++")
    if shutil.which(cxx) is None:
        return f"FlashInfer compiles its kernels when they are first used, and there is no C++ compiler {cxx!r} on PATH"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    toolkit = Path(home or (Path(on_path).parent.parent if on_path else "/usr/local/cuda"))
    nvcc = os.environ.get("FLASHINFER_NVCC") or str(toolkit / "bin" / "nvcc")
    if not Path(nvcc).is_file():
        return (
            f"FlashInfer compiles its kernels when they are first used, and there is no nvcc at {nvcc} "
            f"(set CUDA_HOME, now {home or 'not set'}, to the folder of a CUDA toolkit)"
        )
    return None
