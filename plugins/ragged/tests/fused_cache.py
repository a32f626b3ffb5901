"""Random attention layers, and the KV cache of one with the fused kernel, whose pages are full of garbage."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from itertools import accumulate

import torch
from emssd_ragged.backend import ragged_backend
from hypothesis import strategies as st

from emssd.attention import AttentionBackend, KVCacheSpec, LayerSpec, PackedInputs, PagedBackend

BLOCK = 512  # tokens between two corrections of the kernel's running maximum
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # of one result, relative
GARBAGE = [float("nan"), float("inf"), float("-inf"), 1e30]
QKV = list[torch.Tensor]

dtypes = st.sampled_from(list(ROUNDING))


@st.composite
def layers(draw: st.DrawFn) -> LayerSpec:
    """Up to nine query heads share one KV head, a few more than the kernel computes at once; so do value dimensions."""
    num_kv_heads = draw(st.integers(1, 2))
    return LayerSpec(
        num_qo_heads=num_kv_heads * draw(st.integers(1, 9)),
        num_kv_heads=num_kv_heads,
        key_dim=draw(st.integers(1, 40)),
        value_dim=draw(st.integers(1, 9) | st.integers(10, 100)),
        scale=draw(st.sampled_from([1.0, 0.125, 0.37])),
        sliding_window=draw(st.none() | st.integers(1, 40) | st.integers(BLOCK - 20, BLOCK + 40)),
        softcap=draw(st.sampled_from([None, None, 1.5, 30.0])),
    )


def random_qkv(layer: LayerSpec, dtype: torch.dtype, kv_len: int, seed: int) -> QKV:
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (layer.num_qo_heads, layer.key_dim),
        (layer.num_kv_heads, layer.key_dim),
        (layer.num_kv_heads, layer.value_dim),
    )
    return [torch.randn(kv_len, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


class Cache:
    """A backend with one layer; in the pages of the fused kernel, `garbage` is left of another sequence."""

    def __init__(self, layer: LayerSpec, dtype: torch.dtype, backend: AttentionBackend | None = None,
                 garbage: float = float("nan")) -> None:  # fmt: skip
        self.backend = ragged_backend(kernels="fused") if backend is None else backend
        self.backend.allocate(KVCacheSpec((layer,), dtype, torch.device("cpu"), 64, 4 * BLOCK, trees=True))
        self._garbage = garbage
        if isinstance(self.backend, PagedBackend):
            self.backend._pool.enlarge(128)
            self.forget()

    def forget(self, *names: str) -> None:
        """Leave these rows, and in all pages what another sequence might have left."""
        self.backend.release(names)
        for pages in (*self.backend._pool.keys, *self.backend._pool.values):
            pages.fill_(self._garbage)

    def step(
        self,
        new: dict[str, QKV],
        kv_lens: Seq[int],
        parents: Seq[tuple[int, ...]] | None = None,
        *,
        strided: bool = False,
    ) -> list[torch.Tensor]:
        """Feed new tokens of some rows; of each row ``[new, heads, value_dim]``."""
        lengths = [len(qkv[0]) for qkv in new.values()]
        packed = PackedInputs(
            request_ids=tuple(new),
            input_ids=torch.zeros(sum(lengths), dtype=torch.int64),
            position_ids=torch.zeros(0),
            qo_indptr=(0, *accumulate(lengths)),
            kv_lens=tuple(kv_lens),
            logit_rows=torch.zeros(0, dtype=torch.int64),
            trees=tuple(parents) if parents and any(parents) else None,
        )
        rows = (packed.kv_positions(row)[-length:] for row, length in enumerate(lengths))
        packed = packed._replace(position_ids=torch.tensor([position for row in rows for position in row]))
        together = [torch.cat(tensors) for tensors in zip(*new.values(), strict=True)]
        if strided:
            together = [_spread(tensor) for tensor in together]
        out = self.backend.forward(self.backend.plan(packed), 0, *together)
        return list(torch.split_with_sizes(out, lengths))

    def chain(self, qkv: QKV) -> torch.Tensor:
        """A row of its own without a tree."""
        (out,) = self.step({"chain": qkv}, [len(qkv[0])])
        self.backend.release(["chain"])
        return out


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as a part of a larger tensor, heads first, with rubbish between."""
    tokens, heads, dim = tensor.shape
    larger = torch.full((heads + 1, tokens + 2, dim + 3), 1e30, dtype=tensor.dtype)
    view = larger[1:, 1:-1, 2 : 2 + dim].transpose(0, 1)
    view.copy_(tensor)
    return view


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
