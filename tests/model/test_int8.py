"""`model.weights=int8`: what is rounded, and that a program with a byte for each weight computes the rounded model.

Oracle: the rounded model itself, uncompiled.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from filelock import FileLock

from emssd.cli.config import changed_options
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.errors import ConfigError
from emssd.model import ModelOptions, TargetModel, load_model
from emssd.model.compile import program
from emssd.model.compile.fingerprint import short_pass
from emssd.model.compile.int8 import bytes_of, round_drafter, round_weights, scales_of
from emssd.native import cache_dir, load_kernels
from emssd.sequences import Request

from .conftest import LLMA, opt

PROMPTS = ((3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4), (8,), (9, 3, 11, 4, 9, 3, 12, 5, 9, 3))


def rounded(dtype: torch.dtype = torch.float32) -> Any:
    model = opt(dtype=dtype)
    return model, round_weights(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_weight_goes_to_the_nearest_of_its_output_s_255(dtype: torch.dtype) -> None:
    plain, (model, count) = opt(dtype=dtype), rounded(dtype)
    linears = {name: part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    assert count == sum(linear.weight.numel() for linear in linears.values())
    scales = scales_of(model)
    for name, linear in linears.items():
        before, scale = plain.get_submodule(name).weight, scales[linear.weight.data_ptr()]
        assert torch.equal(scale, before.float().abs().amax(1) / 127)
        values = bytes_of(linear.weight, scale)
        assert torch.equal(values.abs().amax(1), torch.full_like(values[:, 0], 127))
        assert torch.equal((values * scale.unsqueeze(1)).to(dtype), linear.weight), "bytes and scales are the weights"
        assert bool(((before.float() / scale.unsqueeze(1) - values).abs() <= 0.5001).all())
    assert model.lm_head.weight is model.get_input_embeddings().weight
    others = {name: weight for name, weight in model.named_parameters() if weight.ndim == 1}
    assert all(torch.equal(weight, plain.get_parameter(name)) for name, weight in others.items())


@pytest.mark.costly("compiles a model")
def test_a_program_holds_bytes_and_computes_the_rounded_model(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    added = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(load_kernels(), name)

        def add_weight(self, handle: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
            added.append(weight.dtype)
            return load_kernels().add_weight(handle, weight, *rest)

    monkeypatch.setattr(program, "load_kernels", Watched)
    model, _ = rounded()
    with FileLock(cache_dir() / "opt-float32.lock"):
        target = TargetModel(model, ModelOptions(compile=True))
        assert target.compiled is not None
    assert {*added} == {torch.int8}
    got, right = (short_pass(target, run)[0] for run in (target.compiled, target.run))
    assert torch.allclose(got, right, atol=1e-4 * float(right.std()))
    texts = []
    for drafter in ("none", LLMA):
        options = EngineOptions(batch_size=3)
        engine = Engine.assemble(target, None, drafter=drafter, backend="ragged", budget="fixed", options=options)
        requests = [Request(str(row), prompt, 50, frozenset()) for row, prompt in enumerate(PROMPTS)]
        texts.append({done.request_id: done.token_ids for done in engine.run(requests)})
    assert texts[0] == texts[1]
    assert engine.report.mean_acceptance_length > 1


def test_what_drafts_stays_as_it_is_without_kernels_for_it() -> None:
    broken = torch.nn.Linear(3, 2)
    with torch.no_grad():
        broken.weight[1, 2] = torch.inf
    for module in (broken, torch.nn.Linear(3, 2, dtype=torch.float64), torch.nn.Linear(3, 2, device="meta")):
        before = module.weight.detach().clone()
        round_drafter(module)
        assert not scales_of(module)
        assert module.weight.is_meta or torch.equal(module.weight, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int4"}, "model.weights is 'int4'; choose auto or int8"),
        ({"weights": "int8", "tensor_parallel": True}, "leave it or model.tensor_parallel out"),
        ({"weights": "int8", "device": "meta"}, "model.weights=int8 is for CPUs, and the model is on meta"),
    ],
)
def test_what_cannot_be_is_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(ModelOptions("demo-draft", **options))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.tensor([[torch.nan]]), "infinite, or no numbers"),
        (torch.ones(1, 1, dtype=torch.uint8), "the model is quantized already"),
    ],
)
def test_weights_that_cannot_be_rounded_are_refused(weight: torch.Tensor, message: str) -> None:
    model = torch.nn.Linear(1, 1)
    model.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ConfigError, match=message):
        round_weights(model)


def test_a_job_goes_on_only_with_the_same_weights() -> None:
    before, now = "model: {path: demo, dtype: auto}", "model: {path: demo, dtype: auto, weights: %s}"
    assert changed_options(before, now % "auto") == [], "a folder of before there was a choice"
    assert changed_options(before, now % "int8") == ["model.weights"]
