"""Finds out whether FlashInfer's kernels can run on this machine. The cheap questions come first."""

from __future__ import annotations

import os
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

__all__ = ["point_to_toolkit", "reason"]

KNOWN_VERSIONS = ((0, 6, 18), (0, 7, 0))
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
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:3])
    first, beyond = KNOWN_VERSIONS
    if not first <= numbers < beyond:
        taken = f"{_dotted(first)} up to, but not including, {_dotted(beyond)}"
        return f"FlashInfer {installed} is installed, and this version of emssd knows {taken} ({_INSTALL})"
    return None


def _compiler() -> str | None:
    """The tool that is missing to compile kernels when they are first used. FlashInfer searches the same places."""
    if any(file for folder in _folders("flashinfer_jit_cache") for file in folder.glob("**/batch_prefill*.so")):
        return None  # compiled kernels are there; later versions of this package bring none
    if shutil.which("ninja") is None:
        return "FlashInfer compiles its kernels when they are first used, and ninja is not on PATH (pip install ninja)"
    cxx = os.environ.get("CXX", "c++")
    if shutil.which(cxx) is None:
        return f"FlashInfer compiles its kernels when they are first used, and there is no C++ compiler {cxx!r} on PATH"
    home = _given_home()
    nvcc = os.environ.get("FLASHINFER_NVCC") or str((_toolkit() or _DEFAULT) / "bin" / "nvcc")
    if not Path(nvcc).is_file():
        return (
            f"FlashInfer compiles its kernels when they are first used, and there is no nvcc at {nvcc} "
            f"(set CUDA_HOME, now {home or 'not set'}, to the folder of a CUDA toolkit)"
        )
    return None


def point_to_toolkit() -> None:
    """Set CUDA_HOME for FlashInfer, unless it is set, to the CUDA toolkit that was found.

    FlashInfer looks beside the ``nvcc`` on PATH only. That may be a link or a script far from the toolkit.
    """
    if _given_home() is None and (folder := _toolkit()) is not None:
        os.environ["CUDA_HOME"] = str(folder)


_DEFAULT = Path("/usr/local/cuda")


def _given_home() -> str | None:
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")


def _toolkit() -> Path | None:
    """The folder of a CUDA toolkit: the user's own if there is one, else the first that is found, best with headers."""
    if (home := _given_home()) is not None:
        return Path(home)
    # NVIDIA's wheels, which PyTorch depends on, bring one too.
    wheels = [folder for package in _folders("nvidia") for folder in sorted(package.glob("cu[0-9]*"), reverse=True)]
    folders = [_DEFAULT, *sorted(_DEFAULT.parent.glob("cuda-*"), reverse=True), *wheels]
    if (on_path := shutil.which("nvcc")) is not None:
        folders = [Path(on_path).parent.parent, Path(on_path).resolve().parent.parent, *folders]
    toolkits = [folder for folder in folders if (folder / "bin" / "nvcc").is_file()]
    with_headers = (folder for folder in toolkits if (folder / "include" / "cuda_runtime.h").is_file())
    return next(with_headers, (*toolkits, None)[0])


def _folders(package: str) -> list[Path]:
    spec = find_spec(package)
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or []]


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
