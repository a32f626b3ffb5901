"""The target's own rounded weights draft on its own KV cache: no token changes, and exact weights are accepted in full.

Oracles: plain decoding and sampling by hand; products in PyTorch. float64 but where the kernels are tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import emssd_self_draft
import pytest
import torch
from emssd_cascade import CascadeConfig
from emssd_self_draft import SelfConfig
from emssd_testing.models import tiny_model
from emssd_union import UnionConfig

import emssd.model.run.rounded
from emssd.decoding.engine import Engine
from emssd.draft_models import SharedDrafter
from emssd.errors import ConfigError
from emssd.model.compile.int8 import rounded
from emssd.model.run.rounded import RoundedRunner
from emssd.native import load_kernels
from tests.support.right_drafters import decode, loading, target
from tests.support.right_drafts import KINDS, Trial
from tests.support.tiers import looped

DEPTH = 4
NEEDS = {"x86-64-v2": ["sse4_2"], "x86-64-v3": ["avx2"], "x86-64-v4": ["avx512bw"]}
SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "dynamic": {"tree": "dynamic", "num_nodes": 14, "top_k": 3}}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES)


def trial() -> Trial:
    load = loading(emssd_self_draft, SelfConfig, lambda: {"depth": DEPTH})
    return Trial(target(), DEPTH, load, waits=False)


def product(weight: Any, rows: torch.Tensor, num_out: int) -> torch.Tensor:
    """``[n, num_out]``: what the kernel makes of ``rows [n, …]`` and a rounded weight."""
    kernels = load_kernels()
    handle = kernels.new_module()
    kernels.add_weight(handle, weight.values, None, weight.scale)
    out: torch.Tensor = kernels.linear(rows, handle, 0, num_out)
    return out


def make_engine(backend: str = "ragged", **options: Any) -> Engine:
    return trial().make_engine(options, backend)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds nothing, so the drafter is the target."""

    class Kept:
        def __init__(self, weight: torch.Tensor) -> None:
            self.weight = weight

        def dense(self, dtype: torch.dtype) -> torch.Tensor:
            return self.weight

    monkeypatch.setattr(emssd.model.run.rounded, "rounded", lambda weight, bits: Kept(weight))


@pytest.mark.usefixtures("exact")
@looped("backend", ["ragged", "padded"])
@looped("kinds", KINDS)
@EVERY_SHAPE
def test_exact_weights_are_always_accepted(shape: str, kinds: str, backend: str) -> None:
    engine = make_engine(backend, **SHAPES[shape])
    decode(engine, KINDS[kinds])
    (at_first, *_), accepted = sorted(engine.report.acceptance_histogram), engine.report.mean_acceptance_length
    assert at_first == 1
    assert accepted > 3.5
    if shape == "chain":
        assert engine.report.num_accepted == engine.report.num_drafted


@looped("bits", [4, 8])
@looped("kinds", KINDS)
@EVERY_SHAPE
def test_rounded_weights_change_no_token(shape: str, kinds: str, bits: int) -> None:
    engine = make_engine(bits=bits, **SHAPES[shape])
    decode(engine, KINDS[kinds])
    assert engine.report.num_accepted > 0


def test_the_first_layers_alone() -> None:
    engine = make_engine(layers=1)
    decode(engine)
    assert engine.report.num_drafted > 0


@pytest.mark.costly("little memory makes many steps")
@EVERY_SHAPE
def test_rows_that_are_preempted_and_prompts_in_pieces(shape: str) -> None:
    trial().decode_preempted(SHAPES[shape], all_right=False)


def test_a_draft_computes_no_token_that_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slot of the committed KV is written, in any pass of a draft."""
    committed, starts = dict[str, int](), list[bool]()
    run, begin = RoundedRunner.run, SharedDrafter._begin

    def noted(self: Any, batch: Any, budget: Any) -> Any:
        committed.update({row.request_id: row.num_cached for row in batch})
        return begin(self, batch, budget)

    def checked(self: Any, packed: Any) -> Any:
        rows = zip(packed.request_ids, packed.kv_lens, packed.lengths, strict=True)
        starts.extend(end - length >= committed[name] for name, end, length in rows)
        return run(self, packed)

    monkeypatch.setattr(SharedDrafter, "_begin", noted)
    monkeypatch.setattr(RoundedRunner, "run", checked)
    decode(make_engine(**SHAPES["dynamic"]))
    assert starts
    assert all(starts)


def test_a_model_that_changes_is_rounded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two runs all weights become others; the drafts are right only if their copy does."""
    model = tiny_model("llama", vocab_size=13, dtype=torch.float32)
    options = {"budget": "fixed", "drafter": SelfConfig(bits=8), "batch_size": 2}
    made = Mock(wraps=emssd.model.run.rounded.RoundedWeights)
    monkeypatch.setattr(emssd.model.run.rounded, "RoundedWeights", made)
    engine = Engine.from_model(model, frozen=True, **options)
    engine.generate([[1, 2, 3]], 6, ignore_eos=True)
    engine.generate([[1, 2, 3]], 6, ignore_eos=True)
    assert made.call_count == 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    engine.refresh()
    (text,) = engine.generate([[1, 2, 3]], 6, ignore_eos=True)
    assert made.call_count == 2
    (plain,) = Engine.from_model(model, drafter="none", budget="fixed").generate([[1, 2, 3]], 6, ignore_eos=True)
    assert text.token_ids == plain.token_ids


OTHERS = {
    "cascade": CascadeConfig(["llma", "self"], {"llma": {"match_length": 1, "copy_length": 3}}),
    "union": UnionConfig(["llma", "self"], {"llma": {"match_length": 1, "copy_length": 3}, "self": {"depth": 3}}),
    "self": SelfConfig(),
}


@looped("kinds", ["greedy", "mixed"])
@looped("name", OTHERS)
@pytest.mark.parametrize("budget", ["fixed", "adaptive"])
def test_beside_other_drafters_and_with_any_budget(budget: str, name: str, kinds: str) -> None:
    engine = Engine.from_model(target().model, drafter=OTHERS[name], budget=budget, batch_size=4)
    decode(engine, KINDS[kinds])
    assert engine.report.num_drafted > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@looped("sizes", [(1, 1), (33, 31), (70, 32), (40, 100)])
def test_the_kernel_multiplies_what_4_bits_stand_for(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Beside float64, on inputs that bytes hold exactly; any number of rows gives the same bits."""
    generator = torch.Generator().manual_seed(0)
    num_out, num_in = sizes
    weight = rounded(torch.randn(num_out, num_in, generator=generator), 4)
    rows = torch.randint(-126, 127, (19, num_in), generator=generator).double()
    rows[:, ::32] = 127  # so that the scale of each group of inputs is 1
    rows[3] = 0
    out = product(weight, rows.to(dtype), num_out)
    expected = rows @ weight.dense(torch.float64).T
    torch.testing.assert_close(out.double(), expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-3)
    for count in (1, 2, 7, 8, 9):
        assert torch.equal(product(weight, rows[:count].to(dtype), num_out), out[:count])


@looped("value", ["nan", "inf", "-inf"])
@looped("place", [7, 40, 65])
def test_nan_stays_in_its_row(place: int, value: str) -> None:
    rows = torch.ones(3, 70)
    rows[1, place] = float(value)
    out = product(rounded(torch.ones(5, 70), 4), rows, 5)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_inputs_are_rounded_to_the_nearest_byte() -> None:
    """Inputs are scaled by the largest of each 32. Of two equally near bytes, the one farther from 0 is taken."""
    rows = torch.randn(3, 70, generator=torch.Generator().manual_seed(2))
    rows[0, :32] = torch.arange(-16, 16) / 2.0
    rows[0, 0] = -127
    padded = torch.nn.functional.pad(rows, (0, 26)).view(3, 3, 32)
    scale = padded.abs().amax(-1, keepdim=True) / 127
    scaled = padded * (127 / padded.abs().amax(-1, keepdim=True))
    expected = (scaled.sign() * (scaled.abs() + 0.5).floor() * scale).view(3, 96)[:, :70]
    torch.testing.assert_close(product(rounded(torch.eye(70), 4), rows, 70), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.nightly
@pytest.mark.parametrize("processor", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_kernels_of_other_processors(processor: str, tmp_path: Path) -> None:
    """Registers of 16, 32 and 64 bytes, without the newest instructions: built for these, the same tests pass."""
    supported = Path("/proc/cpuinfo").read_text()
    if any(need not in supported for need in NEEDS[processor]):
        pytest.skip(f"this processor is no {processor}")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/bash\nexec c++ "${{@/-march=native/-march={processor}}}"\n')
    compiler.chmod(0o755)
    models = Path(__file__).parents[3] / "tests" / "model"
    files = [__file__, *(str(models / name) for name in ("test_batch_invariance.py", "test_int8.py"))]
    environment = os.environ | {"CXX": str(compiler), "EMSSD_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not nightly", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert list((tmp_path / "cache").rglob("emssd_native.so"))


@looped(
    ("options", "words"),
    [
        ({"bits": 3}, "drafter.bits is 3; choose 4 or 8"),
        ({"layers": 4}, "drafter.layers is 4; choose 1 to 3, as the target has"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_engine(**options)
    assert str(raised.value) == words
