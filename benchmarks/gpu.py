"""Measures `backend=flashinfer` on one GPU: verification steps against their floor, and decoding against its peers.

    python benchmarks/gpu.py --quick --out results/gpu.json          # some minutes on an H200
    python benchmarks/gpu.py --quick --only profile host products --out FILE       # where a step's time goes
    python benchmarks/gpu.py --shape opt-6.7b --out results/gpu.json # all batch sizes and contexts
    python benchmarks/gpu.py --device cpu --shape tiny --quick       # proves that this program works, nothing else

Models have real shapes and random weights that make their greedy text known (`counting_model`), so that every
run's tokens are checked and acceptance can be set: "replay" rows draft 7 tokens, of which as many are right as the
wanted acceptance length says; they stand for a drafter that costs nothing. The floor of a step is what it must move at
the rate of a copy on the same card, or compute at the rate of a large matrix product, whichever takes longer.

Results go to the JSON file (gpu.json) after every piece; a piece that is there already, from the same card, is not
measured again. A piece that fails is recorded as such, and the next one begins; where the device itself fails, the
program ends with exit status 75, and goes on after that piece when it is called again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import make_parser
from gpu_hf import hf_decode
from gpu_loop import loop_decode
from gpu_measure import DRAFTED, FLASHINFER, SHAPES, decode, rates, verify_step
from gpu_parts import DEVICE_FAILED
from gpu_products import products_of, time_product
from gpu_profile import host_timeline, profile_step
from gpu_tables import print_tables
from rich.console import Console

from emssd.cli.provenance import hardware, versions
from emssd.model import ModelOptions, TargetModel
from emssd.model.compile.linears import lay_together
from emssd.model.load.loading import counting_model

Piece = tuple[str, Callable[[], dict[str, Any]]]

KINDS = ["step", "profile", "host", "products", "tuned", "decode", "loop", "padding"]
STEPS = [(8, 8), (1, 8), (8, 1), (16, 5), (24, 8), (128, 1), (128, 8)]  # batch, new tokens per row
BATCHES = [8, 1, 16, 24, 2, 4, 12, 64, 128]
LIBRARIES = {"products": ["cublas", "cublaslt"], "tuned": ["inductor"]}  # of kinds that need no model


def pieces(target: Any, shape: str, arguments: argparse.Namespace) -> Iterator[Piece]:
    """The pieces of one shape, each under a name that says all about it. If `target` is ``None``, none of them runs."""
    contexts, only, repeats = contexts_of(shape, arguments.quick), arguments.only, arguments.repeats
    few = 4 if arguments.quick else None
    steps = dict.fromkeys((min(batch, 8) if shape == "tiny" else batch, tokens) for batch, tokens in STEPS[:few])
    sizes = arguments.batch or BATCHES[:few]
    batches = [*dict.fromkeys(min(size, 4) if shape == "tiny" else size for size in sizes)]
    if "step" in only:
        for context, (batch, tokens), backend in itertools.product(contexts, steps, FLASHINFER):
            name = f"step {shape} {backend} batch={batch} tokens={tokens} context={context}"
            yield name, partial(verify_step, target, backend, batch, tokens, context, repeats)
    if "profile" in only:
        for batch, tokens in [*steps][:4]:
            name = f"profile {shape} flashinfer batch={batch} tokens={tokens} context={contexts[0]}"
            yield name, partial(profile_step, target, "flashinfer", batch, tokens, contexts[0], repeats)
    if "host" in only:
        for batch in batches[:2]:
            name = f"host {shape} flashinfer batch={batch} context={contexts[0]}"
            yield name, partial(host_timeline, target, batch, contexts[0], repeats)
    for library in [library for kind, libraries in LIBRARIES.items() if kind in only for library in libraries]:
        device = torch.device(arguments.device)
        for outputs, inputs in products_of(SHAPES[shape]):
            measure = partial(time_product, library, outputs, inputs, device, _dtype(device), repeats)
            yield f"products {shape} {library} {outputs}x{inputs}", measure
    for batch in batches:
        yield from _decoding(target, shape, batch, contexts[0], arguments)


def _decoding(target: Any, shape: str, batch: int, context: int, arguments: argparse.Namespace) -> Iterator[Piece]:
    only, tau, sizes = arguments.only, arguments.acceptance_length, (batch, context, arguments.new_tokens)
    where = f"batch={batch} context={context} new={arguments.new_tokens}"
    for cache in ("static", "dynamic") if "decode" in only else ():
        yield f"decode {shape} hf {cache} {where}", partial(hf_decode, target, cache, *sizes)
    ours = {"flashinfer": "decode", "flashinfer-eager": "padding", "padded": "padding"}
    for backend in [name for name, kind in ours.items() if kind in only]:
        yield f"decode {shape} {backend} greedy {where}", partial(decode, target, backend, *sizes, None)
        yield f"decode {shape} {backend} replay={tau} {where}", partial(decode, target, backend, *sizes, tau)
    for tokens in (1, DRAFTED + 1) if "loop" in only else ():
        yield f"decode {shape} loop tokens={tokens} {where}", partial(loop_decode, target, tokens, *sizes)


def contexts_of(shape: str, quick: bool) -> list[int]:
    """Cached tokens of a row before a step; decoding is measured after the first."""
    if shape == "tiny":
        return [24]
    return [512] if quick else [512, 128, 1024]


def run_piece(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a piece, or why there is none: whatever went wrong, the next piece may go right."""
    start = time.perf_counter()
    try:
        result = measure()
    except Exception as error:
        traceback.print_exc()
        first = str(error).strip().partition("\n")[0]
        result = {"failed": f"{type(error).__name__}: {first}"}
    return result | {"took_seconds": round(time.perf_counter() - start, 1)}


def give_back() -> str | None:
    """Free what nothing refers to; what the device says if it does not work any more, as after an illegal access."""
    gc.collect()
    if not torch.cuda.is_available():
        return None
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0]
    return None


def machine(device: torch.device, dtype: torch.dtype, shapes: list[str]) -> dict[str, Any]:
    """The machine, and the rates of the floor; if there are only tiny models, those of small operations."""
    run = {"commit": os.environ.get("EMSSD_COMMIT"), "dtype": str(dtype), "drafted": DRAFTED}
    large = device.type == "cuda" and shapes != ["tiny"]
    return hardware(device) | versions() | run | rates(device, dtype, large=large)


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"machine": {}, "pieces": {}}
    return loaded


def measure_shape(shape: str, arguments: argparse.Namespace, results: dict[str, Any], save: Callable[[], None]) -> None:
    """All pieces of one model, which is gone when this returns.

    Raises:
        SystemExit: the device does not work any more.
    """
    known = {*results["pieces"]}
    if all(name in known for name, _ in pieces(None, shape, arguments)):
        return
    start, device, target = time.perf_counter(), torch.device(arguments.device), None
    if not LIBRARIES.keys() >= {*arguments.only}:
        longest = max(contexts_of(shape, arguments.quick)) + arguments.new_tokens + DRAFTED + 1
        sizes = SHAPES[shape] | {"max_position_embeddings": max(longest, 2048)}
        lay_together(model := counting_model(sizes, _dtype(device), device))
        target = TargetModel(model, ModelOptions(max_model_len=longest, compile=False))
        print(f"{shape}: the model is made ({time.perf_counter() - start:.1f} s)", flush=True)
    todo = [piece for piece in pieces(target, shape, arguments) if piece[0] not in known]
    for number, (name, measure) in enumerate(todo, 1):
        result = results["pieces"][name] = run_piece(measure)
        ended = result.get("failed", "measured")
        print(f"{shape} {number}/{len(todo)} {name}: {ended} ({result['took_seconds']} s)", flush=True)
        if broken := give_back():
            result["failed"] = f"{result.get('failed', 'no exception')}; then the device failed: {broken}"
        save()
        if broken:
            print(f"the device does not work any more: {broken}", file=sys.stderr)
            raise SystemExit(DEVICE_FAILED)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float16 if device.type == "cuda" else torch.float32


def main() -> None:
    parser = make_parser(__doc__, repeats=20)
    parser.set_defaults(out=Path("gpu.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["opt-6.7b"])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=["step", "decode"], help="kinds of pieces")
    parser.add_argument("--quick", action="store_true", help="one context, fewer batch sizes")
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes of decoding")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--acceptance-length", type=float, default=4.0, help="mean τ of the replay")
    arguments = parser.parse_args()

    console, device = Console(highlight=False, width=160), torch.device(arguments.device)
    results = load(arguments.out)
    now = machine(device, _dtype(device), arguments.shape)
    if results["machine"] and results["machine"]["device"] != now["device"]:
        arguments.out.rename(arguments.out.with_suffix(f".{'-'.join(results['machine']['device'].split())}.json"))
        results = load(arguments.out)  # figures of two cards stand in two files
    results["machine"] = now
    console.print(now)

    def save() -> None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        part = arguments.out.with_suffix(".part")
        part.write_text(json.dumps(results, indent=2) + "\n")
        part.replace(arguments.out)

    try:
        for shape in arguments.shape:
            measure_shape(shape, arguments, results, save)
            torch.compiler.reset()  # what was compiled for the model holds it
            give_back()
    finally:  # also where it is cut off
        print_tables(results, console)
    wrong = [name for name, row in results["pieces"].items() if row.get("equal_rows", 1) == 0]
    if wrong:
        raise SystemExit(f"no row has the right tokens in: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
