"""A greedy decoding step of an OPT shape on a CPU against its floor, beside Hugging Face's, and the time to start.

    python benchmarks/cpu_step.py --out docs/results/cpu_step.json

The model has random weights, so that nothing need be downloaded; the time of a step does not depend on them. The floor
is the larger of two times: all weights and the KV read once at the bandwidth that a sum over a large tensor reaches,
and the step's arithmetic at the rate that a large matrix product reaches, both measured in the same run.

`--start MODEL` also gives the seconds from the start of a process to its first token with `model.compile=true`, with
empty and with filled caches.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.model import TargetModel
from emssd.sequences import Request

SHAPES = {  # layers, width, heads
    "opt-125m": (12, 768, 12),
    "opt-1.3b": (24, 2048, 32),
}


def random_model(shape: str) -> Any:
    """A bfloat16 OPT of `shape` with random weights."""
    layers, width, heads = SHAPES[shape]
    config = transformers.OPTConfig(
        vocab_size=50272, max_position_embeddings=2048, num_hidden_layers=layers, num_attention_heads=heads,
        hidden_size=width, word_embed_proj_dim=width, ffn_dim=4 * width,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.OPTForCausalLM(config).to(torch.bfloat16).eval()


def best_seconds(run: Callable[[], object], times: int) -> float:
    """The shortest of several runs: what the machine can do."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def machine_rates() -> tuple[float, float]:
    """Bytes per second of reading memory, and bfloat16 FLOPs per second of a matrix product."""
    large = torch.ones(1 << 27, dtype=torch.float32)
    bandwidth = large.numel() * 4 / best_seconds(large.sum, 10)
    a, b = torch.randn(1024, 1024).bfloat16(), torch.randn(1024, 1024).bfloat16()
    return bandwidth, 2 * 1024**3 / best_seconds(lambda: a @ b, 50)


def step_seconds(engine: Engine, prompts: list[list[int]], num_new: int) -> list[float]:
    """Seconds of each step in which all rows decode."""
    seconds = []
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), tuple(prompt), num_new, frozenset()))
    while engine.scheduler.has_work:
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds[num_new // 4 : -2]


def measure(shape: str, batch_sizes: list[int], repeats: int, context: int, console: Console) -> dict[str, Any]:
    """Interleaved repeats of all ways to decode; milliseconds of a step."""
    model = random_model(shape)
    compiled, eager = TargetModel(model, compile=True), TargetModel(model)
    if compiled.compiled is None:
        raise SystemExit("the model could not be compiled; see the warning above")
    bandwidth, rate = machine_rates()
    num_new, rows = 48, []
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    position_table = model.model.decoder.embed_positions.weight.numel() * 2  # only rows of it are read
    for batch_size in batch_sizes:
        prompts = torch.randint(4, 50000, (batch_size, context)).tolist()
        options = EngineOptions(batch_size=batch_size, prefix_caching=False)
        engines = {
            "emssd, model.compile": Engine.assemble(compiled, None, drafter="none", backend="ragged", options=options),
            "emssd": Engine.assemble(eager, None, drafter="none", backend="ragged", options=options),
        }
        times: dict[str, list[float]] = {name: [] for name in [*engines, "Hugging Face generate"]}
        ids = torch.tensor(prompts)
        for repeat in track(range(repeats + 1), f"batch {batch_size}", console=console):
            for name, engine in engines.items():
                found = statistics.median(step_seconds(engine, prompts, num_new))
                if repeat:  # the first one warms up
                    times[name].append(found * 1e3)
            lengths = []
            for length in (num_new // 4, num_new):
                start = time.perf_counter()
                model.generate(ids, do_sample=False, max_new_tokens=length, min_new_tokens=length, pad_token_id=1)
                lengths.append(time.perf_counter() - start)
            if repeat:
                times["Hugging Face generate"].append((lengths[1] - lengths[0]) / (num_new - num_new // 4) * 1e3)
        spec = compiled.kv_cache_spec(batch_size)
        bytes_read = weights - position_table + batch_size * (context + num_new // 2) * spec.bytes_per_token()
        linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
        floor = max(bytes_read / bandwidth, 2 * linear * batch_size / rate) * 1e3
        for name, found in times.items():
            middle = statistics.median(found)
            rows.append(
                {"batch_size": batch_size, "engine": name, "step_ms": middle, "all_ms": found, "floor_ms": floor,
                 "times_floor": middle / floor}
            )  # fmt: skip
    return {"shape": shape, "bandwidth_gb_s": bandwidth / 1e9, "matmul_tflop_s": rate / 1e12, "rows": rows}


def first_token_seconds(model: str, console: Console) -> dict[str, float]:
    """Seconds from the start of the process to the first token of a first and of a later run, all of it included."""
    program = (
        "import time; start = time.time()\n"
        "from emssd import Engine\n"
        f"engine = Engine.from_pretrained({model!r}, compile=True, drafter='none')\n"
        "next(engine.stream(['Once upon a time'], 1))\n"
        "print(time.time() - start)"
    )
    with tempfile.TemporaryDirectory() as folder:
        caches = {"EMSSD_CACHE": f"{folder}/emssd", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        found = {}
        for name in ("empty caches", "filled caches"):
            console.print(f"starting with {name} …")
            command = [sys.executable, "-W", "ignore", "-c", program]
            run = subprocess.run(command, env=os.environ | caches, check=True, capture_output=True, text=True)
            found[name] = float(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="opt-125m")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--context", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--start", metavar="MODEL", help="measure the start of this model as well: a folder or 'demo'")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    result = measure(options.shape, options.batch_sizes, options.repeats, options.context, console)
    table = Table("batch", "engine", "ms per step", "floor", "× floor", title=f"greedy step, {options.shape}, bfloat16")
    for row in result["rows"]:
        table.add_row(
            str(row["batch_size"]), row["engine"], f"{row['step_ms']:.1f}", f"{row['floor_ms']:.1f}",
            f"{row['times_floor']:.2f}",
        )  # fmt: skip
    console.print(table)
    if options.start:
        result["first_token_seconds"] = first_token_seconds(options.start, console)
        console.print(result["first_token_seconds"])
    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    result["machine"] = {
        "processor": platform.processor() or platform.machine(), "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    arguments = ["MODEL" if argument == options.start else argument for argument in sys.argv[1:]]
    result["command"] = " ".join(["python benchmarks/cpu_step.py", *arguments])
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
