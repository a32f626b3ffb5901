"""Milliseconds of one step whose rows have contexts of different lengths, as continuous batches have them.

python benchmarks/mixed_lengths.py --model TARGET
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from emssd.attention import Kept
from emssd.decoding.caches import make_backend
from emssd.decoding.packing import pack
from emssd.drafting import Draft
from emssd.model import CausalLMRunner, load_model
from emssd.plugins.registry import Registry
from emssd.sequences import Request, Row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=90, help="tokens of the first row; each further has 20 more")
    parser.add_argument("--drafted", type=int, nargs="+", default=[0, 3], help="drafted tokens per row")
    parser.add_argument("--repeats", type=int, default=25)
    arguments = parser.parse_args()
    target, _ = load_model(arguments.model, dtype=arguments.dtype, device="cpu")
    runner = CausalLMRunner(target, make_backend(target.kv_cache_spec(arguments.rows), "ragged", Registry()))
    lengths = [arguments.shortest + 20 * i for i in range(arguments.rows)]
    rows = [Row(Request(str(i), tuple(5 + j % 50 for j in range(n)), 99)) for i, n in enumerate(lengths)]

    def step(drafted: int) -> float:
        start = time.perf_counter()
        draft = Draft.from_chains([[7] * drafted] * len(rows))
        runner.run(pack(rows, draft))
        seconds = time.perf_counter() - start
        for row in rows:
            row.num_cached = len(row.tokens) - 1
        runner.commit(Kept(tuple(row.request_id for row in rows), tuple(row.num_cached for row in rows)))
        return seconds

    with torch.inference_mode():
        step(0)
        for drafted in arguments.drafted:
            times = [step(drafted) * 1e3 for _ in range(arguments.repeats)]
            print(
                f"{len(rows)} rows of {lengths[0]} to {lengths[-1]} tokens, {drafted} drafted each, {target.dtype}: "
                f"median {statistics.median(times):.1f} ms, {min(times):.1f} to {max(times):.1f}"
            )


if __name__ == "__main__":
    main()
