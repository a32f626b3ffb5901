"""Makes a folder to carry to a GPU machine without network: what runs there, wheels, built kernels, and the commit.

    python benchmarks/compile_flashinfer.py --prebuild KERNELS                # optional; minutes, needs nvcc
    python benchmarks/gpu_bundle.py FOLDER --python 3.12 --kernels KERNELS    # needs a package index
    benchmarks/gpu_run.sh 1 RESULTS carried                                   # there, in FOLDER

The wheels are what such a machine lacks that has PyTorch with CUDA and Transformers. Docs, examples and all tests
but those of `tests/gpu` stay behind. If a whole working tree travels with the folder, `--beside TREE`
counts its files too.
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
CARRIED = "carried"
LEFT_BEHIND = ("docs/", "examples/", "tests/")
TAKEN = ("tests/gpu/", "tests/support/")
COMPILED = ["msgspec>=0.20"]
PURE = ["hydra-core==1.3.2", "omegaconf==2.3.1", "antlr4-python3-runtime==4.9.3"]  # as in constraints.txt


def tree() -> list[Path]:
    """The files of the project that run on a GPU machine, relative to its root."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in listed.splitlines() if name.startswith(TAKEN) or not name.startswith(LEFT_BEHIND)]


def commit() -> str:
    """The commit of the checkout, and whether files differ from it."""
    said = subprocess.run(["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"], cwd=ROOT,
                          check=True, capture_output=True, text=True)  # fmt: skip
    return said.stdout.strip()


def write(folder: Path) -> None:
    """Copy the files of `tree` into `folder`, and write the commit into ``COMMIT``."""
    for name in tree():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / "COMMIT").write_text(commit() + "\n")


def download(folder: Path, python: str) -> None:
    """The wheels that are needed, for Linux on x86-64 and a version of Python."""
    pip = [sys.executable, "-m", "pip"]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)]
    there = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    subprocess.run([*pip, "download", "-q", "--no-deps", *there, "-d", str(folder), *PINNED, *COMPILED], check=True)
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), *PURE], check=True)


def check_size(folder: Path, beside: Path | None = None) -> int:
    """Bytes of all files in `folder`, and of those that git does not ignore in the tree `beside` it.

    Raises:
        SystemExit: more than may be carried.
    """
    sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    if beside is not None:
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=beside, check=True, capture_output=True, text=True).stdout.splitlines()
        sizes |= {beside / name: (beside / name).stat().st_size for name in names if (beside / name).is_file()}
    total = sum(sizes.values())
    if total > LIMIT:
        largest = ", ".join(f"{file.name} {sizes[file]}" for file in sorted(sizes, key=lambda file: -sizes[file])[:5])
        raise SystemExit(f"{folder} has {total} bytes, and {LIMIT} may be carried; the largest: {largest}")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="made anew")
    parser.add_argument("--python", help="version of Python there, such as 3.12: download wheels for it")
    parser.add_argument("--kernels", type=Path, help="folder from compile_flashinfer.py --prebuild")
    parser.add_argument("--beside", type=Path, help="a git tree that travels too: its files count")
    arguments = parser.parse_args()

    if arguments.folder.exists() and any(arguments.folder.iterdir()):
        raise SystemExit(f"{arguments.folder} is not empty; give a new folder")
    write(arguments.folder)
    carried = arguments.folder / CARRIED
    carried.mkdir()
    if arguments.python:
        download(carried, arguments.python)
    if arguments.kernels:
        shutil.copytree(arguments.kernels, carried / "kernels")
    print(f"{arguments.folder}: {check_size(arguments.folder, arguments.beside)} bytes of {LIMIT}")


if __name__ == "__main__":
    main()
