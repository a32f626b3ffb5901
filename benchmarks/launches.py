"""The launches of a layer of a recorded pass: as PyTorch dispatches it, with fused kernels, and with joined products.

    python benchmarks/launches.py

No GPU is needed: the operations of a pass are counted, of small models with the layers of the real ones. Attention is
two launches, with the kernel that merges what it splits. The milliseconds of small kernels are an estimate.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from common import make_parser, save, show
from emssd_flashinfer.fused import Fusing
from emssd_flashinfer.traced import VIEWS, Op
from emssd_testing.models import tiny_model

from emssd.attention import PackedInputs, PagedBackend
from emssd.model import CausalLMRunner, TargetModel
from tests.support.fused_kernels import Twins
from tests.support.reference_kernels import ReferenceKernels, rerun

SMALL_US = 2.2  # of a small kernel in a CUDA graph, on an H200; an estimate
MODELS = {"OPT-6.7b": ("opt", 32), "Llama-3-8B": ("llama", 32), "Qwen3-8B": ("qwen3", 36), "Gemma-2-9B": ("gemma2", 42)}
WIDE = 1024  # of MLPs, so that joining queries, keys and values takes less memory for a launch


class Launches(NamedTuple):
    """A layer's launches: in all, and of matrix products."""

    all: int
    products: int

    @property
    def small(self) -> int:
        """Neither a product nor attention."""
        return self.all - self.products - 2


class Counted(Fusing):
    """Counts what is launched, before and after."""

    def _fewer(self, plain: list[Op], *others: Any) -> list[Op]:
        fewer = super()._fewer(plain, *others)
        self.counts = [
            Counter("product" if "mm" in str(op.function) else "other" for op in ops if op.function not in VIEWS)
            for ops in (plain, fewer)
        ]
        return fewer


def counts(architecture: str, num_layers: int, fusing: Counted) -> list[Counter[str]]:
    """A pass's launches before and after."""
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": WIDE} if architecture == "opt" else {
        "head_dim": 16, "intermediate_size": WIDE}  # fmt: skip
    target = TargetModel(tiny_model(architecture, num_hidden_layers=num_layers, dtype=torch.bfloat16, **sizes))
    backend = PagedBackend(ReferenceKernels((16,), capture=rerun, fusing=fusing), memory_fraction=0.5)
    backend.allocate(target.kv_cache_spec(1))
    tokens = torch.arange(3)
    with torch.inference_mode():
        CausalLMRunner(target, backend).run(PackedInputs(("a",), tokens, tokens, (0, 3), (3,), tokens))
    return fusing.counts


def layer(architecture: str, joined_bytes: int) -> tuple[Launches, Launches]:
    """A layer's launches before and after."""
    two, three = (counts(architecture, number, Counted(Twins(), joined_bytes)) for number in (2, 3))
    each = [more - less for less, more in zip(two, three, strict=True)]
    before, after = (Launches(sum(one.values()) + 1, one["product"]) for one in each)  # and the one that merges
    return before, after


def main() -> None:
    """Count and print."""
    options = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (architecture, num_layers) in MODELS.items():
        (before, fused), (_, some), (_, joined) = (
            layer(architecture, joined_bytes) for joined_bytes in (0, 3 * 3 * 64 * 64 * 2, 1 << 30)
        )
        rows.append({
            "model": name, "before": before.all, "fused": fused.all, "queries, keys, values joined": some.all,
            "all joined": joined.all, "small kernels before, ms": round(before.small * num_layers * SMALL_US / 1e3, 2),
            "after": round(fused.small * num_layers * SMALL_US / 1e3, 2),
        })  # fmt: skip
    save(options.out, rows)
    show("Launches of a layer, and milliseconds that are estimated", rows[0], [row.values() for row in rows])


if __name__ == "__main__":
    main()
