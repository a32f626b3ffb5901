"""The kernels of packed weights. Oracle: float64, by the numbers of `Rounded` and inputs that are rounded to bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from emssd.model.compile.packed import Rounded, panels_of, rounded
from emssd.native import load_kernels
from tests.support.tiers import looped

ROOT = Path(__file__).parents[2]
EMULATED = ROOT / "tests" / "support" / "emulated_tiles.h"
PROCESSORS = {
    "x86-64-v2": ("-march=x86-64-v2", "sse4_2"),
    "x86-64-v3": ("-march=x86-64-v3", "avx2"),
    "x86-64-v4": ("-march=x86-64-v4", "avx512bw"),
    "tiles": (f"-march=native -include {EMULATED}", "avx512_bf16"),
}
# Bits, inputs of a group, type of the scale; a minimum, the least value and the largest.
KINDS: dict[str, tuple[int, int, torch.dtype, bool, int, int]] = {
    "Q4_0": (4, 32, torch.float16, False, -8, 7),
    "Q4_1, Q4_K": (4, 32, torch.float32, True, 0, 15),
    "Q8_0, Q5_0": (8, 32, torch.float16, False, -128, 127),
    "Q5_1, Q5_K": (8, 32, torch.float32, True, -128, 127),
    "Q6_K": (8, 16, torch.float32, False, -128, 127),
}
SIZES = [(1, 1), (33, 31), (70, 32), (40, 100), (64, 544)]
KERNELS = pytest.mark.usefixtures("kernels")


def weight_of(kind: str, num_out: int, num_in: int) -> Rounded:
    bits, group, dtype, has_minimum, least, most = KINDS[kind]
    generator, groups = torch.Generator().manual_seed(num_in), -(-num_in // group)
    values = torch.randint(least, most + 1, (num_out, num_in), generator=generator).to(torch.int8)
    values[0] = least  # the extremes, with inputs that are all of one sign: where sums of pairs would not fit 16 bits
    scale = torch.randn(num_out, groups, generator=generator).to(dtype)
    minimum = torch.randn(num_out, groups, generator=generator) if has_minimum else None
    return Rounded(values, scale, minimum, bits)


def numbers(weight: Rounded) -> torch.Tensor:
    """``[out, in]`` in float64, written out group by group."""
    group = 16 if weight.scale.dtype is torch.float32 and weight.minimum is None else 32
    result = weight.values.double()
    for first in range(0, result.shape[1], group):
        part = result[:, first : first + group]
        part *= weight.scale[:, first // group, None].double()
        if weight.minimum is not None:
            part += weight.minimum[:, first // group, None].double()
    return result


def in_bytes(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs as bytes times the largest of each 32 over 127. Of two equally near bytes, that farther from 0.

    And where two bytes are so nearly equally near that it counts whether the processor rounds a product before a sum.
    """
    groups = F.pad(rows.float(), (0, -rows.shape[1] % 32)).view(len(rows), -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    scaled = groups * torch.where(largest == 0, 0, 127 / largest)
    nearest = scaled.sign() * (scaled.abs() + 0.5).floor()
    results = nearest.double() * (largest / 127).double(), (scaled.frac().abs() - 0.5).abs() < 1e-4
    first, second = (result.view(len(rows), -1)[:, : rows.shape[1]] for result in results)
    return first, second


def product(weight: Rounded, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out: torch.Tensor = load_kernels().packed_linear(rows, panels_of(weight), bias, len(weight.values))
    return out


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@looped(("num_out", "num_in"), SIZES)
def test_a_row_is_the_sum_of_integers_that_its_bytes_make(
    num_out: int, num_in: int, kind: str, dtype: torch.dtype
) -> None:
    """And it has the same bits beside any number of other rows, with one thread and with two."""
    generator, weight = torch.Generator().manual_seed(0), weight_of(kind, num_out, num_in)
    rows = torch.randn(33, num_in, generator=generator).to(dtype)
    rows[1], rows[2], bias = 1, 0, torch.randn(num_out, generator=generator).to(dtype)
    rows[in_bytes(rows)[1]] = 0
    out, (inputs, _), dense = product(weight, rows, bias), in_bytes(rows), numbers(weight)
    right, magnitude = inputs @ dense.T + bias.double(), inputs.abs() @ dense.abs().T + bias.double().abs()
    unit = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-24
    # Integers are exact; each group is scaled, and added, in float32.
    assert bool(((out.double() - right).abs() <= 2.0**-24 * (num_in / 8 + 8) * magnitude + unit * right.abs()).all())
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows_of_a_call in (1, 3, 8, 17, 33):
                assert torch.equal(product(weight, rows[-rows_of_a_call:], bias), out[-rows_of_a_call:])
    finally:
        torch.set_num_threads(threads)


@KERNELS
@pytest.mark.parametrize("kind", KINDS)
@looped(("num_out", "num_in"), SIZES)
def test_rows_of_an_embedding_are_the_numbers_that_it_stands_for(num_out: int, num_in: int, kind: str) -> None:
    weight = weight_of(kind, num_out, num_in)
    ids = torch.arange(num_out).flip(0)[None]
    rows = load_kernels().packed_embedding(ids, panels_of(weight), num_in)
    assert torch.equal(rows[0], numbers(weight).float().flip(0))
    assert torch.equal(weight.dense(torch.bfloat16), numbers(weight).float().to(torch.bfloat16))
    for beyond in (-1, num_out):
        with pytest.raises(IndexError, match=f"no row {beyond} of {num_out}"):
            load_kernels().packed_embedding(torch.tensor([beyond]), panels_of(weight), num_in)


@KERNELS
@looped("value", ["nan", "inf", "-inf"])
@looped("place", [7, 40, 65])
@looped("kind", KINDS)
def test_nan_stays_in_its_row(place: int, value: str, kind: str) -> None:
    rows = torch.ones(11, 70)
    rows[1, place] = float(value)
    out = product(weight_of(kind, 5, 70), rows)
    assert out[1].isnan().all()
    assert out[[0, *range(2, 11)]].isfinite().all()


@KERNELS
def test_inputs_are_rounded_to_the_nearest_byte() -> None:
    rows = torch.randn(3, 70, generator=torch.Generator().manual_seed(2))
    rows[0, :32] = torch.arange(-16, 16) / 2.0
    rows[0, 0] = -127
    expected = in_bytes(rows)[0].float()
    torch.testing.assert_close(product(rounded(torch.eye(70), 4), rows), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_are_rounded_to_the_nearest_of_their_group(bits: int) -> None:
    weight = torch.randn(5, 70, generator=torch.Generator().manual_seed(3))
    weight[1], weight[2, :32] = 0, 1e9  # nothing to scale by; a scale beyond float16
    copy = rounded(weight, bits)
    assert copy.scale.isfinite().all()
    assert copy.values.abs().max() <= (8 if bits == 4 else 127)
    groups = F.pad(weight, (0, 26)).view(5, 3, 32)[[0, 3, 4]]
    largest = groups.abs().amax(-1, keepdim=True)
    step = largest / (8 if bits == 4 else 127)
    off = (F.pad(copy.dense(torch.float32), (0, 26)).view(5, 3, 32)[[0, 3, 4]] - groups).abs()
    # Half a step, or a whole one at the end that -8 has no number for; and what float16 rounds off scales.
    assert bool((off <= step * (1.0 if bits == 4 else 0.5) + largest * 2.0**-11).all())


@KERNELS
@looped(
    ("changes", "words"),
    [
        ({"bits": 5}, "no kernel for weights of 5 bits"),
        ({"scale": torch.ones(3, 3)}, "no kernel for weights of 8 bits"),
        ({"values": torch.ones(3, 32)}, "packed weights are integers"),
    ],
)
def test_what_there_is_no_kernel_for_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        panels_of(weight_of("Q8_0, Q5_0", 3, 32)._replace(**changes))


@pytest.mark.nightly
@pytest.mark.parametrize("processor", PROCESSORS)
def test_kernels_of_other_processors(processor: str, tmp_path: Path) -> None:
    """Registers of 16, 32 and 64 bytes, without the newest instructions, and AMX tiles by an emulation of their
    instructions: built for these, the same tests pass."""
    flags, need = PROCESSORS[processor]
    if need not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor is no {processor}")
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/bash\nexec c++ ${{@/-march=native/{flags}}}\n")
    compiler.chmod(0o755)
    files = ["native/test_packed.py", "model/test_batch_invariance.py", "native/test_native.py::TestLinear"]
    environment = os.environ | {"CXX": str(compiler), "EMSSD_CACHE": str(tmp_path / "cache")}
    options = ["-q", "-p", "no:cacheprovider", "-m", "not nightly"]
    command = [sys.executable, "-m", "pytest", *options, *(str(ROOT / "tests" / file) for file in files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert list((tmp_path / "cache").rglob("emssd_native.so"))
