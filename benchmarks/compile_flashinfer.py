"""Compiles the FlashInfer kernels that `backend=flashinfer` uses, for sm_90a, on a machine without a GPU.

    python benchmarks/compile_flashinfer.py                  # needs nvcc (CUDA_HOME) and a package index
    python benchmarks/compile_flashinfer.py --wheels DIR     # wheels from a folder instead
    python benchmarks/compile_flashinfer.py --ahead          # with a GPU and FlashInfer installed: fill its cache

FlashInfer and what importing it needs go into a temporary folder. The sources are those that its own just-in-time
compiler generates, the commands are its own; one file after another, objects only, nothing is linked or run. With
``--test`` it also runs the tests that drive FlashInfer's Python code on the CPU with its kernels replaced. ``--ahead``
builds the same variants, but for fa3, all at once and for the card that is there, so that no first use has to wait.
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

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PINNED = ["flashinfer-python==0.6.18.post1", "apache-tvm-ffi==0.1.15.post2"]
IMPORTED = ["nvidia-ml-py", "requests", "packaging", "tqdm"]  # all else that `import flashinfer` needs beside torch
CURAND = "nvidia-curand==10.4.5.25"  # headers that fa3 includes, for toolkits without them; a CUDA PyTorch brings it

# Kernel, dtype, head dimension, sliding window, soft-cap. All four of a file's masks are one template; of these the
# causal one and the one with a custom mask are used.
VARIANTS = [
    ("fa2", "float16", 64, False, False),  # OPT-125m, OPT-1.3b, Llama-3.2-1B
    ("fa2", "float16", 128, False, False),  # OPT-2.7b (heads of 80, padded), OPT-6.7b, OPT-13b
    ("fa2", "bfloat16", 128, False, False),  # Llama-3, Qwen
    ("fa2", "bfloat16", 128, True, False),  # Mistral
    ("fa2", "bfloat16", 256, True, True),  # Gemma 2
    ("fa3", "float16", 128, False, False),  # only with prefill_kernel=fa3
]
_SOURCES = ("batch_prefill_paged_kernel_mask_1.cu", "batch_prefill_paged_kernel_mask_2.cu", "batch_prefill.cu")
_SOURCES_FA3 = ("batch_prefill_paged_sm90_kernel_mask_1.cu",)  # over a minute each, so one stands for all

# As above, for the machine's own cache, on all its cores.
_BUILD = """
import json, sys, torch
from flashinfer.jit.attention import gen_batch_prefill_module
from flashinfer.jit.core import build_jit_specs
from flashinfer.jit.quantization import gen_quantization_module
specs = [gen_quantization_module()]
for kernel, dtype, dim, window, softcap in json.loads(sys.argv[1]):
    dtype = getattr(torch, dtype)
    specs.append(gen_batch_prefill_module(
        kernel, dtype, dtype, dtype, torch.int32, dim, dim, 0, window, softcap, False
    ))
build_jit_specs(specs, verbose=False)
"""

# Runs where FlashInfer is on the path: prints [{"variant", "file", "command"}].
_GENERATE = """
import json, sys, torch
from flashinfer.jit.attention import gen_batch_prefill_module
from flashinfer.jit.quantization import gen_quantization_module
commands = []
for kernel, dtype, dim, window, softcap in json.loads(sys.argv[1]):
    dtype = getattr(torch, dtype)
    spec = gen_batch_prefill_module(
        kernel, dtype, dtype, dtype, torch.int32, dim, dim, 0, window, softcap, False
    )
    name = f"{kernel} {str(dtype)[6:]} {dim}" + " window" * window + " softcap" * softcap
    commands += [{"variant": name, "file": entry["file"], "command": entry["command"]}
                 for entry in spec.get_compile_commands()]
commands += [{"variant": "packbits", "file": entry["file"], "command": entry["command"]}
             for entry in gen_quantization_module().get_compile_commands()]
print("COMMANDS" + json.dumps(commands))
"""


def install(folder: Path, wheels: Path | None) -> None:
    """FlashInfer without its dependencies, and what importing it needs, into `folder`."""
    source = ["--no-index", "--find-links", str(wheels)] if wheels else []
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *source]
    subprocess.run([*pip, "--no-deps", *PINNED], check=True)
    subprocess.run([*pip, *IMPORTED], check=True)
    if not (cuda_home() / "include" / "curand_kernel.h").is_file():
        subprocess.run([*pip, "--no-deps", CURAND], check=True)


def cuda_home() -> Path:
    return Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))


def commands(environment: dict[str, str]) -> list[dict[str, str]]:
    """The compile commands of all variants, as FlashInfer itself would run them."""
    script = [sys.executable, "-c", _GENERATE, json.dumps(VARIANTS)]
    printed = subprocess.run(script, env=environment, check=True, capture_output=True, text=True).stdout
    found: list[dict[str, str]] = json.loads(printed.partition("COMMANDS")[2])
    wanted = []
    bound: set[str] = set()
    for entry in found:
        name, kernel = Path(entry["file"]).name, entry["variant"].split()[0]
        if name in (_SOURCES_FA3 if kernel == "fa3" else _SOURCES) or kernel == "packbits":
            wanted.append(entry)
        elif "binding" in name and kernel not in bound and kernel == "fa2":  # the same for each variant
            bound.add(kernel)
            wanted.append(entry)
    return wanted


def compile_all(entries: list[dict[str, str]], environment: dict[str, str], console: Console) -> list[dict[str, Any]]:
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
        console.print(f"{number}/{len(entries)} {row['variant']} {row['file']}: {verdict}, {row['seconds']} s")
        if not row["ok"]:
            console.print(done.stderr[-3000:], markup=False)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder with the wheels, for machines without an index")
    parser.add_argument("--test", action="store_true", help="also run the tests of FlashInfer's Python code")
    parser.add_argument("--ahead", action="store_true", help="build for this machine's GPU, into FlashInfer's cache")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()

    console = Console(highlight=False)
    if arguments.ahead:
        start = time.perf_counter()
        few = json.dumps([variant for variant in VARIANTS if variant[0] != "fa3"])
        subprocess.run([sys.executable, "-c", _BUILD, few], check=True)
        console.print(f"built {len(json.loads(few))} variants in {time.perf_counter() - start:.0f} s")
        return
    with tempfile.TemporaryDirectory(prefix="compile-flashinfer-") as folder:
        site = Path(folder) / "site"
        install(site, arguments.wheels)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "FLASHINFER_WORKSPACE_BASE": folder,
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            "FLASHINFER_EXTRA_CUDAFLAGS": f"-I{site / 'nvidia' / 'cu13' / 'include'}",
            "CUDA_HOME": str(cuda_home()),
        }
        if arguments.test:
            tests = [str(ROOT / "tests" / "backends" / "test_flashinfer_wrapper.py"), "-q", "-p", "no:cacheprovider"]
            subprocess.run([sys.executable, "-m", "pytest", *tests], env=environment, check=True, cwd=ROOT)
        nvcc = str(cuda_home() / "bin" / "nvcc")
        release = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        rows = compile_all(commands(environment), environment, console)
    table = Table("kernel", "files", "seconds", "compiled")
    for variant in dict.fromkeys(row["variant"] for row in rows):
        of_it = [row for row in rows if row["variant"] == variant]
        table.add_row(
            variant,
            str(len(of_it)),
            f"{sum(row['seconds'] for row in of_it):.0f}",
            "all" if all(row["ok"] for row in of_it) else "NOT ALL",
        )
    console.print(table)
    result = {"packages": PINNED, "nvcc": release.strip().splitlines()[-1], "arch": "sm_90a", "files": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    if not all(row["ok"] for row in rows):
        raise SystemExit("some kernels do not compile; see above")


if __name__ == "__main__":
    main()
