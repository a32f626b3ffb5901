"""Builds FlashInfer's kernels before they are used, and puts them where it loads them from without its compiler.

    python benchmarks/kernels_ahead.py --variants fp16-128 --keep FOLDER     # FlashInfer installed; a GPU, or an arch

FlashInfer looks for a module at ``spec.aot_path``, inside of its package, before it asks ninja. Modules built here are
copied there, and to FOLDER, by version and architecture; what FOLDER has is not built again. So a FOLDER that was
filled elsewhere, by ``compile_flashinfer.py --prebuild``, can be carried to a machine with a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

__all__ = ["VARIANTS", "build", "specs_of"]

VARIANTS = {  # dtype, head dimension, sliding window, soft-cap
    "fp16-128": ("float16", 128, False, False),  # OPT-2.7b (heads of 80, padded), OPT-6.7b, OPT-13b
    "fp16-64": ("float16", 64, False, False),  # OPT-125m, OPT-1.3b, Llama-3.2-1B
    "bf16-128": ("bfloat16", 128, False, False),  # Llama-3, Qwen
    "bf16-128-window": ("bfloat16", 128, True, False),  # Mistral
    "bf16-256": ("bfloat16", 256, False, False),  # DFlash on heads of 128, whose keys are one element longer
    "bf16-256-window-softcap": ("bfloat16", 256, True, True),  # Gemma 2
}
"""All four of a module's masks are one template; of these the causal one and the one with a custom mask are used."""


def specs_of(names: Iterable[str]) -> dict[str, Any]:
    """FlashInfer's `JitSpec` of each variant."""
    import torch
    from flashinfer.jit.attention import gen_batch_prefill_module

    specs = {}
    for name in names:
        dtype_name, dim, window, softcap = VARIANTS[name]
        dtype = getattr(torch, dtype_name)
        specs[name] = gen_batch_prefill_module(
            "fa2", dtype, dtype, dtype, torch.int32, dim, dim, 0, window, softcap, False
        )
    return specs


def build(specs: dict[str, Any], keep: Path, cores: int, *, load: bool) -> dict[str, str]:
    """Bring each module to its ``aot_path`` and to `keep`, all at once; one that fails does not stop the others.

    Args:
        specs: by name.
        keep: folder with those of earlier calls.
        cores: for the processes that all the ninjas start together, up to two for each.
        load: also load each, and build anew one that does not load.

    Returns:
        How each came there: "there already", "kept", "built in N s", or "FAILED: " and why.
    """
    os.environ["MAX_JOBS"] = str(max(1, 2 * cores // len(specs)))  # they end at different times
    found = {}
    with ThreadPoolExecutor(len(specs)) as pool:
        running = {pool.submit(_bring, spec, keep / f"{spec.name}.so", load): name for name, spec in specs.items()}
        for future in as_completed(running):
            name = running[future]
            try:
                found[name] = future.result()
            except Exception as error:  # whatever the compiler, the linker or the disk says
                found[name] = f"FAILED: {str(error).strip()[-2000:]}"
            print(f"{name}: {found[name]}", flush=True)
    return found


def _bring(spec: Any, kept: Path, load: bool) -> str:
    if spec.aot_path.exists() and _loads(spec, load):
        if not kept.exists():
            _copy(spec.aot_path, kept)
        return "there already"
    why = f", as there is no {kept}"
    if kept.exists():
        _copy(kept, spec.aot_path)
        if _loads(spec, load):
            return "kept"
        why = f", as {kept} does not load"
    start = time.perf_counter()
    spec.build(need_lock=True)
    _copy(spec.jit_library_path, spec.aot_path)
    if not _loads(spec, load):
        raise RuntimeError(f"{spec.jit_library_path} was built, and does not load; FlashInfer's warning says why")
    _copy(spec.jit_library_path, kept)
    return f"built in {time.perf_counter() - start:.0f} s{why}"


def _loads(spec: Any, load: bool) -> bool:
    """Whether `spec` loads from its ``aot_path``; one that does not is removed."""
    if load and spec.try_load() is None:
        spec.aot_path.unlink()
        return False
    return True


def _copy(source: Path, target: Path) -> None:
    """Copy, so that nobody ever sees half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}")
    shutil.copyfile(source, part)
    part.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=[*VARIANTS], metavar="NAME")
    parser.add_argument("--keep", type=Path, required=True, help="folder that survives, for the built modules")
    arguments = parser.parse_args()

    import torch
    from flashinfer.jit import env

    version, arch = env.FLASHINFER_WORKSPACE_DIR.parts[-2:]
    found = build(
        specs_of(arguments.variants),
        arguments.keep / version / arch,
        len(os.sched_getaffinity(0)),
        load=torch.cuda.is_available(),
    )
    if failed := [name for name, how in found.items() if how.startswith("FAILED")]:
        raise SystemExit(f"these kernels could not be built: {', '.join(failed)}")


if __name__ == "__main__":
    main()
