"""The linear layers of a step on a CPU, alone, against their floor: bfloat16, int8 and 4 bits, by rows.

    python benchmarks/linear_layers.py --rows 1 4 5 8 16 20 --out docs/results/linear_layers.json

The layers are those of a Llama of 468M parameters, each with weights of its own, so that none is in a cache. The
floor is the larger of two times: the bytes of the weights at the rate of a sum over as much memory, and the arithmetic
at the rate of a large matrix product in bfloat16, both measured in the same turns. Weights of 4 and 8 bits count with
their scales. Integers multiply faster than bfloat16, so their floor is reading alone.

All take turns; figures are medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import best_ms, in_large_pages, make_parser, save, show

from emssd.model.compile.packed import panels_of, rounded
from emssd.native import load_kernels

WIDTH, INNER, VOCABULARY = 1024, 4096, 32000
SHAPES = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER)]
BYTES = {"bfloat16": 2.0, "int8": 1 + 2 / 32, "int4": 0.5 + 2 / 32}
BITS = {"int8": 8, "int4": 4}
PRODUCT = 1024  # rows and columns of the large matrix product


def layers(kind: str, num_layers: int) -> Callable[[int], None]:
    """A function of the number of rows that computes all linear layers of a step."""
    kernels = load_kernels()
    handle, outputs, inputs = (
        kernels.new_module(),
        [*SHAPES * num_layers, (VOCABULARY, WIDTH)],
        dict[int, torch.Tensor](),
    )
    weights = {shape: torch.randn(shape, dtype=torch.bfloat16) for shape in set(outputs)}
    copies = {shape: rounded(weight, BITS[kind]) for shape, weight in weights.items()} if kind in BITS else {}
    for shape in outputs:
        kernels.add_weight(handle, panels_of(copies[shape]) if shape in copies else weights[shape], None)

    for num_in in {num_in for _, num_in in outputs}:
        inputs[num_in] = torch.randn(32, num_in, dtype=torch.bfloat16)

    def run(rows: int) -> None:
        for layer, (num_out, num_in) in enumerate(outputs):
            kernels.linear(inputs[num_in][:rows], handle, layer, num_out)

    return run


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("--kinds", choices=list(BYTES), nargs="+", default=list(BYTES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 5, 8, 16, 20], help="32 at most")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    num_weights = sum(num_out * num_in for num_out, num_in in SHAPES) * options.layers + VOCABULARY * WIDTH
    memory = in_large_pages(num_weights // 2)  # as many bytes as the weights in bfloat16
    square = torch.randn(PRODUCT, PRODUCT).to(torch.bfloat16)
    steps = {kind: layers(kind, options.layers) for kind in options.kinds}
    rows: list[dict[str, Any]] = []
    for num_rows in options.rows:
        runs: dict[str, Callable[[], object]] = {kind: partial(step, num_rows) for kind, step in steps.items()}
        runs |= {"read": memory.sum, "product": lambda: [torch.mm(square, square) for _ in range(10)]}
        turns = [{name: best_ms(run, 1) for name, run in runs.items()} for _ in range(options.repeats + 1)][1:]
        middle = {name: statistics.median(turn[name] for turn in turns) for name in runs}
        product = middle["product"] / 10 * num_rows * num_weights / PRODUCT**3
        for kind in steps:
            read = middle["read"] * BYTES[kind] / BYTES["bfloat16"]
            floor = read if kind in BITS else max(read, product)
            row = {"kind": kind, "rows": num_rows, "ms": middle[kind], "read_ms": read, "product_ms": product}
            row |= {"times_floor": middle[kind] / floor, "bandwidth_gb_s": memory.numel() * 4 / middle["read"] / 1e6}
            rows.append(row | {"all_ms": [turn[kind] for turn in turns]})
    rows.sort(key=lambda row: options.kinds.index(row["kind"]))
    figures = ("ms", "read_ms", "product_ms", "times_floor", "bandwidth_gb_s")
    lines = [[row["kind"], row["rows"], *(f"{row[name]:.2f}" for name in figures)] for row in rows]
    title = f"linear layers of {num_weights / 1e6:.0f}M weights, {options.threads} threads"
    show(title, ("kind", "rows", *figures), lines)
    save(options.out, rows, dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
