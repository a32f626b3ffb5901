"""A step that verifies a token tree against a step with as many chain tokens, on `backend=ragged`.

    python benchmarks/tree_step.py --model MODEL --out docs/results/tree_step.json

A step is packing, the forward pass, verification and `commit`, which for trees moves the KV of an accepted node, in
each row. `attention` is that of all layers alone, in one call each. Chain and tree take turns; the ratio is the median
over pairs of neighbours.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from emssd_ragged.backend import ragged_backend
from rich.console import Console
from rich.progress import track
from rich.table import Table

from emssd.attention import Kept
from emssd.decoding.packing import pack
from emssd.decoding.verify import greedy_tokens, verify
from emssd.drafting import Draft
from emssd.model import CausalLMRunner, TargetModel, load_model

SHAPES: dict[str, Callable[[int], list[int]]] = {  # parents by number of nodes
    "bushy": lambda n: [node // 4 - 1 for node in range(n)],  # four children each
    "long": lambda n: [-1, -1, 0, *range(2, n - 1)],  # one way, and a sibling of its first node
}


@dataclass
class Row:
    """What `pack` reads of a sequence."""

    request_id: str
    tokens: list[int]
    num_cached: int


def best_of(run: Callable[[], object], times: int) -> float:
    """Milliseconds of one run, the least of several. With one thread it is CPU time: other programs take none of it."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = []
    for _ in range(times):
        start = clock()
        run()
        seconds.append(clock() - start)
    return min(seconds) * 1e3


class Steps:
    """Rows of one length that are cached but for their newest token, and steps over them that can be run again."""

    def __init__(self, model: TargetModel, batch_size: int, context: int) -> None:
        self.runner = CausalLMRunner(model, backend := ragged_backend())
        backend.allocate(spec := model.kv_cache_spec(batch_size))
        self.layers = spec.layers
        self.context = context
        ids = torch.randint(4, model.vocab_size, (batch_size, context + 1)).tolist()
        self.rows = [Row(str(number), tokens, 0) for number, tokens in enumerate(ids)]
        self.runner.run(pack([], Draft.empty(0), [(row, context) for row in self.rows]))
        for row in self.rows:
            row.num_cached = context

    def draft(self, parents: list[int] | None, num_nodes: int) -> Draft:
        ids = torch.randint(4, self.runner.vocab_size, (len(self.rows) * num_nodes,))
        indptr = tuple(range(0, len(ids) + 1, num_nodes))
        return Draft(ids, indptr, None if parents is None else tuple(parents) * len(self.rows))

    def step(self, draft: Draft) -> None:
        verify(greedy_tokens(self.runner.run(pack(self.rows, draft)).logits), draft)
        moved = ((self.context + 2,),) * len(self.rows) if draft.parents is not None else ()
        names = tuple(row.request_id for row in self.rows)
        self.runner.commit(Kept(names, (self.context + 2,) * len(self.rows), moved))

    def attention(self, draft: Draft) -> Callable[[], None]:
        """Plans the step of `draft`. Returns what runs its attention."""
        backend, packed = self.runner.backend, pack(self.rows, draft)
        plan, layer, generator = backend.plan(packed), self.layers[0], torch.Generator().manual_seed(0)
        shapes = [(layer.num_qo_heads, layer.key_dim), *[(layer.num_kv_heads, layer.key_dim)] * 2]
        qkv = [torch.randn(packed.num_tokens, *shape, generator=generator).bfloat16() for shape in shapes]

        def run() -> None:
            for number in range(len(self.layers)):
                backend.forward(plan, number, *qkv)

        return run


@torch.inference_mode()
def measure(model: TargetModel, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Milliseconds of chain and tree, and the ratio, for each setting."""
    settings = [(batch, context) for batch in options.batch_sizes for context in options.contexts]
    found = []
    for batch_size, context in track(settings, "measuring", console=console):
        steps = Steps(model, batch_size, context)
        for num_nodes in options.nodes:
            drafts = {name: steps.draft(shape(num_nodes), num_nodes) for name, shape in SHAPES.items()}
            drafts = {"chain": steps.draft(None, num_nodes), **drafts}
            for what in options.what:
                times: dict[str, list[float]] = {name: [] for name in drafts}
                for repeat in range(options.repeats + 1):
                    for name, draft in drafts.items():
                        run = steps.attention(draft) if what == "attention" else partial(steps.step, draft)
                        milliseconds = best_of(run, options.runs)
                        if repeat:  # the first one warms up
                            times[name].append(milliseconds)
                row = {"batch_size": batch_size, "context": context, "nodes": num_nodes, "what": what, "all_ms": times}
                row |= {f"{name}_ms": statistics.median(each) for name, each in times.items()}
                for name in SHAPES:
                    pairs = zip(times[name], times["chain"], strict=True)
                    row[f"{name}_ratio"] = statistics.median(tree / chain for tree, chain in pairs)
                found.append(row)
                ratios = ", ".join(f"{name} {row[f'{name}_ratio']:.2f}" for name in SHAPES)
                console.print(f"batch {batch_size}, context {context}, {num_nodes} nodes, {what}: "
                              f"chain {row['chain_ms']:.3f} ms; {ratios} x")  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, or 'demo'")
    parser.add_argument("--compile", action="store_true", help="with model.compile=true")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 512, 1900])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--runs", type=int, default=3, help="of a repeat; the quickest counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--what", nargs="+", choices=["attention", "step"], default=["attention", "step"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    console = Console()
    target, _ = load_model(options.model, dtype="bfloat16", device="cpu", compile=options.compile)
    rows = measure(target, options, console)
    columns = ("batch", "context", "nodes", "what", "chain, ms", *(f"{name} / chain" for name in SHAPES))
    table = Table(*columns, title=f"a tree against a chain of as many nodes, {options.threads} threads")
    for row in rows:
        table.add_row(
            str(row["batch_size"]), str(row["context"]), str(row["nodes"]), row["what"], f"{row['chain_ms']:.3f}",
            *(f"{row[f'{name}_ratio']:.2f}" for name in SHAPES),
        )  # fmt: skip
    console.print(table)
    if options.out:
        result = {
            "rows": rows,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
                        "capability": torch.backends.cpu.get_cpu_capability()},
            "command": " ".join(["python benchmarks/tree_step.py", *("MODEL" if argument == options.model else argument
                                                                    for argument in sys.argv[1:])]),
        }  # fmt: skip
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
