"""Two processes of one thread, by tensor parallel, beside one process of two threads, on a CPU.

    python benchmarks/tensor_parallel.py --out tensor_parallel.json

A Llama of random weights decodes greedily, without drafts. Both ways use two cores and read the same weights from the
same memory, so this shows what the processes' talk costs, and no gain: that takes devices with memories of their own.
The ways take turns, `--repeats` times. Within a turn, every batch size is decoded once after a short start. A figure is
the median over the turns. Tokens of both ways are compared row by row.
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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SHAPES = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4, "vocab": 64},
    "110m": {
        "hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 2816, "num_attention_heads": 16,
        "vocab": 8192,
    },
}  # fmt: skip
WAYS = {"1 process, 2 threads": (1, 2), "2 processes, 1 thread": (2, 1), "1 process, 1 thread": (1, 1)}
PROMPT = 64  # tokens


def save(folder: Path, shape: str) -> None:
    """A checkpoint of random weights, with a tokenizer that knows nothing."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    values = dict(SHAPES[shape])
    config = LlamaConfig(vocab_size=values.pop("vocab"), max_position_embeddings=2048, num_key_value_heads=2, **values)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(8)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def decode(folder: str, batch_sizes: list[int], new_tokens: int, threads: int, *, parallel: bool) -> None:
    """Run one process; prints, for each batch size, milliseconds of a step and the tokens."""
    import torch

    from emssd import Engine

    torch.set_num_threads(threads)
    found: dict[str, Any] = {}
    engine = Engine.from_pretrained(folder, drafter="none", batch_size=max(batch_sizes), tensor_parallel=parallel)
    for batch_size in batch_sizes:
        prompts = [[4 + (7 * row + i) % 40 for i in range(PROMPT)] for row in range(batch_size)]
        engine.generate(prompts, max_new_tokens=4, ignore_eos=True)
        rows = engine.generate(prompts, max_new_tokens=new_tokens, ignore_eos=True)
        seconds = batch_size / engine.report.metrics()["decode_tokens_per_second"]
        found[str(batch_size)] = {"ms": 1000 * seconds, "tokens": [list(row.token_ids) for row in rows]}
    if not parallel or torch.distributed.get_rank() == 0:
        print("found: " + json.dumps(found))


def started(way: str, arguments: list[str]) -> dict[str, Any]:
    """The figures of one turn of one way."""
    processes, threads = WAYS[way]
    run = [sys.executable]
    if processes > 1:
        run += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*run, __file__, *arguments, "--threads", str(threads), *(["--parallel"] if processes > 1 else [])]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    line = next(line for line in done.stdout.splitlines() if line.startswith("found: "))
    figures: dict[str, Any] = json.loads(line.removeprefix("found: "))
    return figures


def main() -> None:
    """Measure, print a table, and write every figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="110m")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    for name in ("--folder", "--threads"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--parallel", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder:
        decode(given.folder, given.batch_sizes, given.new_tokens, int(given.threads), parallel=given.parallel)
        return
    turns: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), given.shape)
        arguments = ["--folder", folder, "--new-tokens", str(given.new_tokens), "--batch-sizes"]
        arguments += map(str, given.batch_sizes)
        for _ in range(given.repeats):
            for way in WAYS:
                turns[way].append(started(way, arguments))
    rows = []
    for way, figures in turns.items():
        for batch_size in map(str, given.batch_sizes):
            times = [turn[batch_size]["ms"] for turn in figures]
            wanted = turns["1 process, 2 threads"][0][batch_size]["tokens"]
            equal = min(sum(map(list.__eq__, turn[batch_size]["tokens"], wanted)) for turn in figures)
            row = {"way": way, "batch_size": int(batch_size), "ms": statistics.median(times), "all_ms": times}
            rows.append(row | {"equal_rows": equal})
    table = Table("way", "batch", "ms a step", "range", "equal rows", title=f"Llama shape {given.shape}, float32")
    for row in rows:
        low, high = min(row["all_ms"]), max(row["all_ms"])
        counted = f"{row['equal_rows']} of {row['batch_size']}"
        table.add_row(row["way"], str(row["batch_size"]), f"{row['ms']:.1f}", f"{low:.1f}-{high:.1f}", counted)
    Console().print(table)
    if given.out:
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        given.out.write_text(json.dumps({"shape": given.shape, **machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
