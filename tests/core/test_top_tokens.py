"""The most probable tokens: the same from the kernel and from PyTorch, and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from emssd.decoding.top_tokens import top_tokens
from emssd.native import load_kernels
from tests.support.tiers import looped

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
NEAR = {torch.bfloat16: 1e-5, torch.float16: 1e-5, torch.float32: 1e-5, torch.float64: 1e-12}


@looped("dtype", DTYPES)
@looped("size", [1, 3, 16, 17, 100])
@looped("width", [1, 3, 20])
def test_tokens_are_the_largest_in_order_and_shares_those_of_softmax(
    kernels: None, dtype: torch.dtype, size: int, width: int
) -> None:
    load_kernels()
    generator = torch.Generator().manual_seed(size)
    wide = (5 * torch.randn(20, 2 * size, generator=generator, dtype=torch.float64)).to(dtype)
    logits = wide[:, :size]  # rows that lie apart, as those of a larger vocabulary do
    for temperature in (1.0, 0.5, 2.0):
        tokens, log_probs = top_tokens(logits, width, temperature)
        right = (logits.double() / temperature).log_softmax(dim=1)
        for row, (own, shares) in enumerate(zip(tokens, log_probs, strict=True)):
            assert len(own) == len(set(own)) == len(shares) == min(width, size)
            assert logits[row, own].tolist() == logits[row].sort(descending=True).values[: len(own)].tolist()
            assert shares == pytest.approx(right[row, own].tolist(), abs=NEAR[dtype], rel=NEAR[dtype])


def test_of_equals_the_kernel_takes_the_first(kernels: None) -> None:
    load_kernels()
    logits = torch.zeros(1, 50)
    logits[0, [40, 7, 33]] = 1.0
    assert top_tokens(logits, 5)[0] == [[7, 33, 40, 0, 1]]


@looped("dtype", DTYPES)
@looped("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_never_hoped_for(kernels: None, dtype: torch.dtype, bad: float) -> None:
    load_kernels()
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0], logits[1, ::2], logits[2, 5] = bad, bad, bad
    tokens, log_probs = top_tokens(logits, 4)
    assert all(0 <= token < 40 for row in tokens for token in row)
    assert all(not math.isnan(share) and share <= 0 for row in log_probs for share in row)
    assert log_probs[0] == [-math.inf] * 4
    if bad == float("-inf"):
        assert all(token % 2 for token in tokens[1])
        assert sum(map(math.exp, top_tokens(logits[1:2], 20)[1][0])) == pytest.approx(1.0)
    assert sum(map(math.exp, top_tokens(logits[3:], 40)[1][0])) == pytest.approx(1.0, abs=1e-3)
