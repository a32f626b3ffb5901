"""Milliseconds of choosing sampled tokens on a CPU, by the kernel and by PyTorch, and the kernel's share of a step.

    python benchmarks/sampling_choice.py --compile --out docs/results/sampling_choice.json

The model has some 134M random weights and a vocabulary of 32,000, unless `--model` names another one. Its logits are
those of a step after prompts of `--context` tokens. Random weights give flat logits, so that noise is hashed for every
token. A step packs one token for each row, runs the model, chooses by the kernel, verifies, and commits. Choosing
includes the host's work for each row. All ways take turns; the table has medians. With one thread, times are CPU time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from emssd_ragged.backend import ragged_backend
from rich.console import Console
from rich.progress import track
from rich.table import Table

from emssd.attention import Kept
from emssd.decoding.choosing import choices
from emssd.decoding.packing import pack
from emssd.decoding.verify import verify
from emssd.drafting import Draft
from emssd.model import CausalLMRunner, TargetModel, load_model
from emssd.native import load_kernels
from emssd.sampling import SamplingParams
from emssd.sequences import Batch, Request, Row

WAYS: dict[str, dict[str, Any]] = {
    "T": {},
    "T, top_k 50": {"top_k": 50},
    "T, top_p 0.9": {"top_p": 0.9},
    "all, min_p 0.05": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
}
TEMPERATURE = 0.8


def random_model(dtype: torch.dtype) -> Any:
    """A Llama of 134M random weights."""
    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


class Steps:
    """Rows whose prompts are cached but for the last token, and the parts of a step over them."""

    def __init__(self, model: TargetModel, batch_size: int, context: int) -> None:
        self.runner = CausalLMRunner(model, backend := ragged_backend())
        backend.allocate(model.kv_cache_spec(batch_size))
        self.prompts = torch.randint(4, model.vocab_size, (batch_size, context + 1)).tolist()
        self.draft = Draft.empty(batch_size)
        self.batch = self.sampled(SamplingParams())
        for row in self.batch:
            row.num_cached = 0
        self.runner.run(pack([], Draft.empty(0), [(row, context) for row in self.batch]))
        for row in self.batch:
            row.num_cached = context
        self.kept = Kept(tuple(row.request_id for row in self.batch), (context,) * batch_size)
        self.forward()

    def sampled(self, params: SamplingParams) -> Batch:
        """The rows, sampled in that way."""
        requests = [Request(str(row), tuple(ids), 9, sampling=params) for row, ids in enumerate(self.prompts)]
        return Batch(tuple(Row(each, num_cached=len(each.prompt_ids) - 1) for each in requests))

    def forward(self) -> None:
        """All of a step but for its choice; it can be run again."""
        self.logits = self.runner.run(pack(self.batch.rows, self.draft)).logits
        verify(torch.zeros(len(self.batch), dtype=torch.int64), self.draft)
        self.runner.commit(self.kept)

    def choose(self, batch: Batch) -> torch.Tensor:
        """The tokens of the last step, by the kernel."""
        return choices(self.logits, batch, self.draft)

    def choose_in_pytorch(self, batch: Batch) -> torch.Tensor:
        """The same without kernels."""
        with patch("emssd.sampling.choice.loaded_kernels", lambda: None):
            return self.choose(batch)


def milliseconds(run: Callable[[], object], times: int) -> float:
    """Of one run, the least of several. With one thread it is CPU time: other programs take none of it."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = []
    for _ in range(times):
        start = clock()
        run()
        seconds.append(clock() - start)
    return min(seconds) * 1e3


@torch.inference_mode()
def measure(model: TargetModel, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """A row for each batch size and way to sample."""
    found = []
    for batch_size in options.batch_sizes:
        steps = Steps(model, batch_size, options.context)
        batches = {name: steps.sampled(SamplingParams(TEMPERATURE, **way)) for name, way in WAYS.items()}
        times: dict[str, list[float]] = {}
        for repeat in track(range(options.repeats + 1), f"batch {batch_size}", console=console):
            turn = {"forward": milliseconds(steps.forward, 3)}
            for name, batch in batches.items():
                turn[name] = milliseconds(partial(steps.choose, batch), 5)
                turn[f"{name}, PyTorch"] = milliseconds(partial(steps.choose_in_pytorch, batch), 2)
            for name, value in turn.items() if repeat else ():  # the first one warms up
                times.setdefault(name, []).append(value)
        middle = {name: statistics.median(each) for name, each in times.items()}
        for name, batch in batches.items():
            same = torch.equal(steps.choose(batch), steps.choose_in_pytorch(batch))
            step = middle["forward"] + middle[name]
            found.append(
                {"batch_size": batch_size, "way": name, "kernel_ms": middle[name],
                 "pytorch_ms": middle[f"{name}, PyTorch"], "step_ms": step, "share": middle[name] / step,
                 "all_kernel_ms": times[name], "all_forward_ms": times["forward"], "same_tokens": same}
            )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or 'demo'")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--compile", action="store_true", help="with model.compile=true")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--context", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    load_kernels()
    console = Console()
    if options.model:
        model, _ = load_model(options.model, dtype=options.dtype, device="cpu", compile=options.compile)
    else:
        model = TargetModel(random_model(getattr(torch, options.dtype)), compile=options.compile)
    rows = measure(model, options, console)
    title = f"temperature {TEMPERATURE}, vocabulary {model.vocab_size}, threads: {options.threads}"
    table = Table("batch", "sampled with", "kernel, ms", "PyTorch, ms", "step, ms", "kernel's share", title=title)
    for row in rows:
        table.add_row(
            str(row["batch_size"]), row["way"], f"{row['kernel_ms']:.2f}", f"{row['pytorch_ms']:.1f}",
            f"{row['step_ms']:.1f}", f"{row['share']:.1%}",
        )  # fmt: skip
    console.print(table)
    if options.out:
        arguments = ["MODEL" if argument == options.model else argument for argument in sys.argv[1:]]
        result = {
            "rows": rows,
            "dtype": options.dtype,
            "vocab_size": model.vocab_size,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
                        "capability": torch.backends.cpu.get_cpu_capability()},
            "command": " ".join(["python benchmarks/sampling_choice.py", *arguments]),
        }  # fmt: skip
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
