"""Finds what FlashInfer compiles with, where it is not where FlashInfer looks, and prints it for a shell to evaluate.

    eval "$(python benchmarks/cuda_toolkit.py LINKS)"

FlashInfer wants ``nvcc`` and headers under ``CUDA_HOME``, and links ``-lcuda -lcudart``. A machine may have ``nvcc``
only as a wrapper script, or the driver only as ``libcuda.so.1``. The folder LINKS gets a ``libcuda.so`` and a
``libcudart.so`` where the linker would find none. Uses the standard library alone.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import site
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["DRIVER_FOLDERS", "cuda_home", "environment", "prepare_links"]

DRIVER_FOLDERS = (
    "/usr/local/nvidia/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/cuda/compat",
)
_LINKER_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


def cuda_home(variables: Mapping[str, str], usual: Path = Path("/usr/local/cuda")) -> Path | None:
    """The folder with ``bin/nvcc`` that ``CUDA_HOME``, `usual`, or the ``nvcc`` on ``PATH`` means; ``None`` without."""
    named = [Path(variables[name]) for name in ("CUDA_HOME", "CUDA_PATH") if variables.get(name)]
    for folder in [*named, usual]:
        if _is_toolkit(folder):
            return folder
    found = shutil.which("nvcc", path=variables.get("PATH"))
    if found is None:
        return None
    linked = Path(found).resolve().parent.parent
    if _is_toolkit(linked):
        return linked
    # A wrapper script: nvcc itself says where it is.
    said = subprocess.run([found, "--dryrun", "-c", "none.cu"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    folder = Path(os.path.normpath(top[1].strip())) if top else None
    return folder if folder is not None and _is_toolkit(folder) else None


def _is_toolkit(folder: Path) -> bool:
    return (folder / "bin" / "nvcc").is_file() and (folder / "include" / "cuda_runtime.h").is_file()


def prepare_links(links: Path, home: Path, found_in: Iterable[str | Path], linker: Iterable[str | Path]) -> bool:
    """Fill `links` with ``libcuda.so`` and ``libcudart.so`` where neither `linker` nor the toolkit's folders has them.

    They point to versioned files from `found_in`. Without a driver, ``libcuda.so`` is an empty library of the driver's
    name, which is enough to link for another machine.

    Returns:
        Whether the linker needs the folder.
    """
    toolkit = [home / "lib64", home / "lib64" / "stubs"]  # where FlashInfer tells the linker to look
    places = [Path(folder) for folder in found_in]
    places += [home / "lib", *home.glob("targets/*/lib"), *home.glob("targets/*/lib/stubs")]
    for name in ("libcuda.so", "libcudart.so"):
        if any((folder / name).exists() for folder in [*toolkit, *map(Path, linker)]):
            continue
        links.mkdir(parents=True, exist_ok=True)
        (links / name).unlink(missing_ok=True)
        if found := [file for folder in places for file in sorted(folder.glob(f"{name}*")) if file.is_file()]:
            (links / name).symlink_to(found[0])
        elif name == "libcuda.so":
            empty = ["-shared", "-x", "c", os.devnull, "-Wl,-soname,libcuda.so.1", "-o", str(links / name)]
            subprocess.run([os.environ.get("CXX", "c++"), *empty], check=True)
    return links.is_dir() and any(links.iterdir())


def environment(links: Path, variables: Mapping[str, str], packages: Iterable[str | Path]) -> dict[str, str]:
    """The variables to set, for the machine's `variables` and the site-packages folders `packages`.

    Raises:
        SystemExit: there is no ``nvcc`` with headers.
    """
    home = cuda_home(variables)
    if home is None:
        raise SystemExit("cuda_toolkit: no nvcc with headers; set CUDA_HOME to the folder of a CUDA toolkit")
    new = {"CUDA_HOME": str(home)}
    wheels = [folder for package in packages for folder in sorted(Path(package).glob("nvidia/*"))]
    libraries = [path for path in variables.get("LD_LIBRARY_PATH", "").split(":") if path]
    found_in = [*libraries, *DRIVER_FOLDERS, *(folder / "lib" for folder in wheels)]
    if prepare_links(links, home, found_in, _LINKER_FOLDERS):
        flags = variables.get("FLASHINFER_EXTRA_LDFLAGS", "").split()
        new["FLASHINFER_EXTRA_LDFLAGS"] = " ".join(dict.fromkeys([*flags, f"-L{links}"]))
    return new


if __name__ == "__main__":
    chosen = environment(Path(sys.argv[1]).resolve(), os.environ, site.getsitepackages())
    print("".join(f"export {name}={shlex.quote(value)}\n" for name, value in chosen.items()), end="")
