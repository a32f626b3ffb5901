"""Which way to attend over ragged KV in pure PyTorch on this machine: the measurement of docs/decisions/0001.

    python benchmarks/attention_layout.py

Prints microseconds per layer: a loop of one call per row, one masked call over a rectangle, gathering the rectangle
from pages, and medians of interleaved repeats thereof.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

PAGE = 16


def candidates(batch: int, new: int, context: int, heads: int, dim: int, dtype: torch.dtype) -> dict[str, object]:
    pages_per_row = -(-context // PAGE)
    pool = torch.randn(2 * batch * pages_per_row, PAGE, heads, dim, dtype=dtype)
    pages = torch.randperm(len(pool))[: batch * pages_per_row]
    query = torch.randn(batch, heads, new, dim, dtype=dtype)
    keys = pool[pages].view(batch, -1, heads, dim).transpose(1, 2)
    mask = torch.ones(batch, 1, new, keys.shape[2], dtype=torch.bool)

    def loop() -> None:
        for row in range(batch):
            F.scaled_dot_product_attention(query[row : row + 1], keys[row : row + 1], keys[row : row + 1])

    def one_call() -> None:
        F.scaled_dot_product_attention(query, keys, keys, attn_mask=mask)

    def gather() -> None:
        pool.index_select(0, pages)
        pool.index_select(0, pages)

    return {"loop of calls": loop, "one masked call": one_call, "gathering K and V": gather}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=208)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    table = Table("dtype", "batch", "new tokens", "loop of calls", "one masked call", "gathering K and V")
    for dtype in (torch.float32, torch.bfloat16):
        for batch in (8, 16):
            for new in (1, 4, 8):
                runs = candidates(batch, new, arguments.context, arguments.heads, arguments.dim, dtype)
                times: dict[str, list[float]] = {name: [] for name in runs}
                for _ in range(arguments.repeats):
                    for name, run in runs.items():
                        start = time.perf_counter()
                        run()  # type: ignore[operator]
                        times[name].append((time.perf_counter() - start) * 1e6)
                medians = [f"{statistics.median(times[name]):.0f}" for name in runs]
                table.add_row(str(dtype).removeprefix("torch."), str(batch), str(new), *medians)
    Console().print(f"microseconds per layer, {torch.get_num_threads()} threads, context {arguments.context}")
    Console().print(table)


if __name__ == "__main__":
    main()
