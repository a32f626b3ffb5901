"""Measures `backend=flashinfer` on one GPU: verification steps against their floor, and decoding against its peers.

    python benchmarks/gpu.py --quick --out results/gpu.json          # some minutes on an H200
    python benchmarks/gpu.py --shape opt-6.7b --out results/gpu.json # all batch sizes and contexts
    python benchmarks/gpu.py --device cpu --shape tiny --quick       # proves that this program works, nothing else

Models have the shapes of OPT and random weights that make their greedy text known (`gpu_models.py`), so that every
run's tokens are checked and acceptance can be set: "replay" rows draft 7 tokens, of which as many are right as the
wanted acceptance length says; they stand for a drafter that costs nothing. The floor of a step is what it must move at
the rate of a copy on the same card, or compute at the rate of a large matrix product, whichever takes longer.

Results go to the JSON file after every piece; a piece that is there already is not measured again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_measure import DRAFTED, decode, hf_decode, rates, verify_step
from gpu_models import SHAPES, opt_model
from rich.console import Console
from rich.table import Table

from emssd.errors import OutOfMemoryError
from emssd.model import TargetModel
from emssd.model.costs import Costs

Piece = tuple[str, Callable[[], dict[str, Any]]]

STEPS = [(1, 8), (8, 1), (8, 8), (16, 5), (24, 8), (128, 1), (128, 8)]  # batch, new tokens per row
QUICK_STEPS = [(1, 8), (8, 1), (8, 8), (16, 5)]
BATCHES, QUICK_BATCHES = [1, 2, 4, 8, 12, 16, 24, 64, 128], [2, 4, 8, 16, 24]
PAPER_LLMA = {2: 3.50, 4: 2.83, 8: 2.17, 16: 1.63, 24: 1.41}  # OPT-6.7b, speed-up over its greedy decoding


def pieces(target: TargetModel, shape: str, arguments: argparse.Namespace) -> Iterator[Piece]:
    """What is measured for one shape, each under a name that says all about it."""
    contexts = contexts_of(shape, arguments.quick)
    for context, (batch, tokens) in itertools.product(contexts, QUICK_STEPS if arguments.quick else STEPS):
        if shape == "tiny" and batch > 8:
            continue
        for backend in ("flashinfer", "flashinfer-eager"):
            name = f"step {shape} {backend} batch={batch} tokens={tokens} context={context}"
            yield name, partial(verify_step, target, backend, batch, tokens, context, arguments.repeats)
    new, tau = arguments.new_tokens, arguments.acceptance_length
    for batch in QUICK_BATCHES if arguments.quick else BATCHES:
        if shape == "tiny" and batch > 4:
            continue
        where = f"batch={batch} context={contexts[0]} new={new}"
        for backend in ("flashinfer", "padded"):
            yield (
                f"decode {shape} {backend} greedy {where}",
                partial(decode, target, backend, batch, contexts[0], new, None),
            )
            yield (
                f"decode {shape} {backend} replay={tau} {where}",
                partial(decode, target, backend, batch, contexts[0], new, tau),
            )
        yield f"decode {shape} hf dynamic {where}", partial(hf_decode, target, "dynamic", batch, contexts[0], new)
        if batch == 8 or not arguments.quick:  # compiles for a minute
            yield f"decode {shape} hf static {where}", partial(hf_decode, target, "static", batch, contexts[0], new)


def contexts_of(shape: str, quick: bool) -> list[int]:
    """Cached tokens of a row before a step; decoding is measured behind the first."""
    if shape == "tiny":
        return [24]
    return [512] if quick else [512, 128, 1024]


def run_piece(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a piece, or why there is none; what a piece held is given back."""
    try:
        return measure()
    except (torch.OutOfMemoryError, OutOfMemoryError) as error:
        return {"failed": f"out of memory: {str(error).splitlines()[0]}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What it ran on, and the rates of the floor."""
    import transformers

    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dtype": str(dtype).removeprefix("torch."),
        "drafted": DRAFTED,
    }
    return found | rates(device, dtype)


def table_of_steps(results: dict[str, Any], console: Console) -> None:
    rate = results["machine"]
    table = Table("step", "ms", "floor, ms", "× floor", "plan", "forward", "verify (waits)", title="verification steps")
    for name, row in results["pieces"].items():
        if not name.startswith("step") or "failed" in row:
            continue
        batch, tokens, context = (int(word.partition("=")[2]) for word in name.split()[3:])
        costs = Costs(**{field: row[field] for field in Costs.__dataclass_fields__})
        moved, flops = costs.of_step(batch, batch * tokens, batch * (context + tokens))
        floor = max(moved / rate["bytes_per_second"], flops / rate["flops_per_second"])
        parts = (f"{1e3 * row[part + '_seconds']:.2f}" for part in ("plan", "forward", "verify"))
        seconds = row["seconds"]
        table.add_row(name[5:], f"{1e3 * seconds:.2f}", f"{1e3 * floor:.2f}", f"{seconds / floor:.2f}", *parts)
    console.print(table)


def table_of_decoding(results: dict[str, Any], console: Console) -> None:
    """Tokens/s of decoding steps, and ratios to our own greedy run and to Hugging Face with a dynamic cache."""
    found = results["pieces"]
    table = Table(
        "run", "tokens/s", "× own greedy", "× HF dynamic", "paper's ×", "τ", "padding per token", "right rows",
        title="decoding, without the steps that compute prompts",
    )  # fmt: skip
    for name, row in found.items():
        if not name.startswith("decode"):
            continue
        if "failed" in row:
            table.add_row(name[7:], row["failed"])
            continue
        _, shape, engine, kind, *where = name.split()
        batch = int(where[0].partition("=")[2])
        greedy = found.get(" ".join(["decode", shape, engine, "greedy", *where]), {})
        dynamic = found.get(" ".join(["decode", shape, "hf", "dynamic", *where]), {})
        speed = row["tokens_per_second"]
        paper = PAPER_LLMA.get(batch) if (shape, engine, kind[:6]) == ("opt-6.7b", "flashinfer", "replay") else None
        table.add_row(
            name[7:],
            f"{speed:.0f}",
            f"{speed / greedy['tokens_per_second']:.2f}" if kind.startswith("replay") and greedy else "",
            f"{speed / dynamic['tokens_per_second']:.2f}" if dynamic else "",
            f"{paper:.2f}" if paper else "",
            f"{row['acceptance_length']:.2f}" if "acceptance_length" in row else "",
            f"{row['padding_per_new_token']:.2f}" if "padding_per_new_token" in row else "",
            f"{row['equal_rows']}/{batch}",
        )
    console.print(table)


def load(path: Path | None) -> dict[str, Any]:
    if path is not None and path.is_file():
        loaded: dict[str, Any] = json.loads(path.read_text())
        return loaded
    return {"machine": {}, "pieces": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["opt-6.7b"])
    parser.add_argument("--quick", action="store_true", help="one context, fewer batch sizes, one compiled HF run")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20, help="of a verification step")
    parser.add_argument(
        "--acceptance-length", type=float, default=4.0,
        help="mean τ of the replay; the paper prints none, its speed-ups at batch 1 (3.04, 3.69) lie below it",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="JSON file; what is in it already is not measured again")
    arguments = parser.parse_args()

    console, device = Console(highlight=False, width=160), torch.device(arguments.device)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    results = load(arguments.out)
    now = machine(device, dtype)
    if results["machine"] and results["machine"]["device"] != now["device"]:
        raise SystemExit(
            f"{arguments.out} is from {results['machine']['device']}, this is {now['device']}; give another"
        )
    results["machine"] = now
    console.print(now)
    for shape in arguments.shape:
        longest = max(contexts_of(shape, arguments.quick)) + arguments.new_tokens + DRAFTED + 1
        target = TargetModel(opt_model(SHAPES[shape], dtype, device, longest), max_model_len=longest)
        todo = [piece for piece in pieces(target, shape, arguments) if piece[0] not in results["pieces"]]
        for number, (name, measure) in enumerate(todo, 1):
            result = results["pieces"][name] = run_piece(name, measure)
            figure = "tokens_per_second" if "tokens_per_second" in result else "seconds"
            said = result.get("failed") or f"{figure} {result[figure]:.4g}"
            console.print(f"{shape} {number}/{len(todo)} {name}: {said}")
            if arguments.out is not None:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(results, indent=2) + "\n")
        del target
    table_of_steps(results, console)
    table_of_decoding(results, console)
    wrong = [name for name, row in results["pieces"].items() if row.get("equal_rows", 1) == 0]
    if wrong:
        raise SystemExit(f"no row has the right tokens in: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
