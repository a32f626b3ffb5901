"""Makes a folder to carry to a GPU machine without network, beside a copy of the tree: wheels and built kernels.

    python benchmarks/compile_flashinfer.py --prebuild KERNELS                 # optional; minutes, needs nvcc
    python benchmarks/gpu_bundle.py carried --python 3.12 --kernels KERNELS    # needs a package index
    bash benchmarks/gpu_run.sh 1                                               # there

The wheels are what such a machine lacks that has PyTorch with CUDA and Transformers.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from compile_flashinfer import PINNED

ROOT = Path(__file__).resolve().parents[1]
COMPILED = ["msgspec>=0.20"]
PURE = ["hydra-core==1.3.2", "omegaconf==2.3.1", "antlr4-python3-runtime==4.9.3"]  # as in constraints.txt


def download(folder: Path, python: str) -> None:
    """The wheels that are needed, for Linux on x86-64 and a version of Python."""
    pip = [sys.executable, "-m", "pip"]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)]
    there = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    subprocess.run([*pip, "download", "-q", "--no-deps", *there, "-d", str(folder), *PINNED, *COMPILED], check=True)
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), *PURE], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="made anew")
    parser.add_argument("--python", help="version of Python there, such as 3.12: download wheels for it")
    parser.add_argument("--kernels", type=Path, help="folder from compile_flashinfer.py --prebuild")
    arguments = parser.parse_args()

    arguments.folder.mkdir()
    describe = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    (arguments.folder / "COMMIT").write_text(commit)
    if arguments.python:
        download(arguments.folder, arguments.python)
    if arguments.kernels:
        shutil.copytree(arguments.kernels, arguments.folder / "kernels")
    print(f"{arguments.folder}: {sum(file.stat().st_size for file in arguments.folder.rglob('*'))} bytes")


if __name__ == "__main__":
    main()
