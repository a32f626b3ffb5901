"""Compiles the FlashInfer kernels that `backend=flashinfer` uses, for sm_90a, on a machine without a GPU.

    python benchmarks/compile_flashinfer.py                  # needs nvcc and a package index
    python benchmarks/compile_flashinfer.py --prebuild DIR   # whole modules, to be carried to a machine with a GPU

FlashInfer and what importing it needs go into a temporary folder; without an index, set pip's PIP_NO_INDEX and
PIP_FIND_LINKS. The sources are those that its own just-in-time compiler generates, the commands are its own; one file
after another, objects only, nothing is linked or run. With ``--test`` it also runs the tests that drive FlashInfer's
Python code on the CPU with its kernels replaced. ``--prebuild`` builds and links whole modules instead, for
`kernels_ahead.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cuda_toolkit import environment as toolkit_environment
from kernels_ahead import VARIANTS

ROOT = Path(__file__).resolve().parents[1]
PINNED = ["flashinfer-python==0.6.18.post1", "apache-tvm-ffi==0.1.15.post2"]
IMPORTED = ["nvidia-ml-py", "requests", "packaging", "tqdm"]  # all else that `import flashinfer` needs beside torch

_SOURCES = ("batch_prefill_paged_kernel_mask_1.cu", "batch_prefill_paged_kernel_mask_2.cu", "batch_prefill.cu")

# Runs where FlashInfer is on the path: prints [{"variant", "file", "command"}].
_GENERATE = """
import json
from kernels_ahead import VARIANTS, specs_of
commands = [{"variant": name, "file": entry["file"], "command": entry["command"]}
            for name, spec in specs_of(VARIANTS).items() for entry in spec.get_compile_commands()]
print("COMMANDS" + json.dumps(commands))
"""


def install(folder: Path) -> None:
    """FlashInfer without its dependencies, and what importing it needs, into `folder`."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder)]
    subprocess.run([*pip, "--no-deps", *PINNED], check=True)
    subprocess.run([*pip, *IMPORTED], check=True)


def compiling(folder: Path, site: Path, arch: str) -> dict[str, str]:
    """The environment in which FlashInfer of `site` works in `folder`, for `arch`."""
    found = os.environ | toolkit_environment(folder / "links", os.environ, [site])
    paths = [str(site), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return found | {
        "PYTHONPATH": os.pathsep.join(paths),
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "FLASHINFER_CUDA_ARCH_LIST": arch,
    }


def commands(environment: dict[str, str]) -> list[dict[str, str]]:
    """The compile commands of all variants, as FlashInfer itself would run them."""
    script = [sys.executable, "-c", _GENERATE]
    printed = subprocess.run(script, env=environment, check=True, capture_output=True, text=True).stdout
    found: list[dict[str, str]] = json.loads(printed.partition("COMMANDS")[2])
    wanted = []
    bound = False
    for entry in found:
        name = Path(entry["file"]).name
        if name in _SOURCES:
            wanted.append(entry)
        elif "binding" in name and not bound:  # the same for each variant
            bound = True
            wanted.append(entry)
    return wanted


def compile_all(entries: list[dict[str, str]], environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run the commands one after another, with low priority."""
    rows = []
    for number, entry in enumerate(entries, 1):
        command = entry["command"].split()
        Path(command[command.index("-o") + 1]).parent.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        done = subprocess.run(["nice", "-n", "10", *command], env=environment, capture_output=True, text=True)
        row = {
            "variant": entry["variant"],
            "file": Path(entry["file"]).name,
            "seconds": round(time.perf_counter() - start, 1),
            "ok": done.returncode == 0,
        }
        rows.append(row)
        verdict = "ok" if row["ok"] else "FAILED"
        print(f"{number}/{len(entries)} {row['variant']} {row['file']}: {verdict}, {row['seconds']} s", flush=True)
        if not row["ok"]:
            print(done.stderr[-3000:], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", action="store_true", help="also run the tests of FlashInfer's Python code")
    parser.add_argument("--prebuild", type=Path, metavar="DIR", help="build modules into this folder, and end")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=[*VARIANTS], help="to prebuild")
    parser.add_argument("--arch", default="9.0a", help="CUDA architecture to prebuild for")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="compile-flashinfer-") as folder:
        site = Path(folder) / "site"
        install(site)
        environment = compiling(Path(folder), site, arguments.arch if arguments.prebuild else "9.0a")
        if arguments.prebuild:
            script = [str(ROOT / "benchmarks" / "kernels_ahead.py"), "--keep", str(arguments.prebuild.resolve())]
            subprocess.run([sys.executable, *script, "--variants", *arguments.variants], env=environment, check=True)
            return
        if arguments.test:
            tests = [str(ROOT / "plugins" / "flashinfer" / "tests" / "test_wrapper.py"), "-q", "-p", "no:cacheprovider"]
            subprocess.run([sys.executable, "-m", "pytest", *tests], env=environment, check=True, cwd=ROOT)
        nvcc = str(Path(environment["CUDA_HOME"]) / "bin" / "nvcc")
        release = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        rows = compile_all(commands(environment), environment)
    print(f"{len(rows)} files, {sum(row['seconds'] for row in rows):.0f} s")
    result = {"packages": PINNED, "nvcc": release.strip().splitlines()[-1], "arch": "sm_90a", "files": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    if not all(row["ok"] for row in rows):
        raise SystemExit("some kernels do not compile; see above")


if __name__ == "__main__":
    main()
