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
LIMIT = 64 * 2**20  # bytes
COMPILED = ["msgspec>=0.20"]
PURE = ["hydra-core==1.3.2", "omegaconf==2.3.1", "antlr4-python3-runtime==4.9.3"]  # as in constraints.txt


def git(*command: str) -> str:
    """The output of git in the checkout."""
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def download(folder: Path, python: str) -> None:
    """The wheels that are needed, for Linux on x86-64 and a version of Python."""
    pip = [sys.executable, "-m", "pip"]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)]
    there = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    subprocess.run([*pip, "download", "-q", "--no-deps", *there, "-d", str(folder), *PINNED, *COMPILED], check=True)
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), *PURE], check=True)


def check_size(folder: Path) -> int:
    """Bytes of all files in `folder`, and of those in the checkout that git does not ignore.

    Raises:
        SystemExit: more than may be carried.
    """
    tree = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    files = {*folder.rglob("*"), *(ROOT / name for name in tree)}
    total = sum(file.stat().st_size for file in files if file.is_file())
    if total > LIMIT:
        raise SystemExit(f"{folder} and the tree have {total} bytes, and {LIMIT} may be carried; bring fewer kernels")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="made anew")
    parser.add_argument("--python", help="version of Python there, such as 3.12: download wheels for it")
    parser.add_argument("--kernels", type=Path, help="folder from compile_flashinfer.py --prebuild")
    arguments = parser.parse_args()

    arguments.folder.mkdir()
    (arguments.folder / "COMMIT").write_text(git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"))
    if arguments.python:
        download(arguments.folder, arguments.python)
    if arguments.kernels:
        shutil.copytree(arguments.kernels, arguments.folder / "kernels")
    print(f"{arguments.folder} and the tree: {check_size(arguments.folder)} bytes of {LIMIT}")


if __name__ == "__main__":
    main()
