"""Packed models: what `model.weights=int8` makes, that they run as any other, and that no draft changes their text.

Oracles: the numbers that packed weights stand for; the module's own `generate`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from emssd_testing.models import tiny_model
from filelock import FileLock
from torch import nn

from emssd.cli.config import changed_options
from emssd.decoding.engine import Engine
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.model import ModelOptions, TargetModel, load_model
from emssd.model.compile import packed
from emssd.model.compile.fingerprint import short_pass
from emssd.model.compile.packed import (
    PackedEmbedding,
    PackedLinear,
    Rounded,
    pack_model,
    round_drafter,
    round_weights,
    rounded,
)
from emssd.model.hf.probe import PROBE_TOLERANCE
from emssd.native import cache_dir
from tests.native.test_packed import in_bytes
from tests.support.tiers import looped

from .conftest import LLMA, opt

PROMPTS = [[3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4], [8], [9, 3, 11, 4, 9, 3, 12, 5, 9, 3]]
DRAFTERS: dict[str, Any] = {"none": "none", "llma": LLMA, "self": "self"}


def packed_model(architecture: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Layers of 4 and of 8 bits, and one that stays dense."""
    model = tiny_model(architecture, vocab_size=37, dtype=dtype)

    def make(name: str, weight: torch.Tensor) -> Rounded | None:
        return None if "o_proj" in name else rounded(weight, 4 if "mlp" in name else 8)

    assert pack_model(model, make) > 0
    return model


@pytest.mark.usefixtures("kernels")
def test_a_packed_model_in_float32_is_held_to_the_roundings_of_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last bit of attention moves an input from one byte to the next: 0.04 standard deviations in a model of 34M."""
    monkeypatch.setitem(PROBE_TOLERANCE, torch.float32, -1.0)
    with pytest.raises(UnsupportedModelError, match="gives other logits"):
        TargetModel(tiny_model("llama", vocab_size=37, dtype=torch.float32), ModelOptions(""))
    target = TargetModel(packed_model("llama", torch.float32), ModelOptions(""))
    assert (target.dtype, target.precision) == (torch.float32, torch.bfloat16)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_packed_model_computes_with_the_numbers_that_it_stands_for(architecture: str) -> None:
    """Beside a dense model of these numbers, whose inputs are rounded. What others read of its modules is as before."""
    model = packed_model(architecture, torch.float32)
    dense = copy.deepcopy(plain := tiny_model(architecture, vocab_size=37, dtype=torch.float32))
    for name, part in dense.named_modules():
        if isinstance(part, nn.Linear) and "o_proj" not in name:
            part.weight.data = rounded(part.weight.data, 4 if "mlp" in name else 8).dense(torch.float32)
            part.register_forward_pre_hook(lambda _, args: (in_bytes(args[0][0])[0].float()[None],))
    dense.tie_weights()
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        right, *others = (one(ids).logits for one in (dense, model, plain))
    off, far = (float((logits - right).std() / right.std()) for logits in others)
    assert off < 0.005 < 0.02 < far
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(head, PackedLinear)
    tied = plain.config.tie_word_embeddings
    assert tied == isinstance(table, PackedEmbedding) == (head.weight is table.weight)
    if tied:
        assert head.panels is table.panels
        assert torch.equal(table(ids), dense.get_input_embeddings()(ids)), "also what its class does to them"
    assert (head.weight.shape, head.weight.dtype) == (plain.get_output_embeddings().weight.shape, torch.float32)
    assert head.weight.untyped_storage().nbytes() == 4
    assert not any(one.requires_grad for one in (head.weight, table.weight) if isinstance(table, PackedEmbedding))


@pytest.mark.usefixtures("kernels")
@looped("drafter", DRAFTERS)
@pytest.mark.parametrize(
    ("architecture", "compiles"),
    [
        ("llama", False),
        ("gemma3_text", False),
        pytest.param("llama", True, marks=pytest.mark.costly("compiles a model")),
        pytest.param("gemma3_text", True, marks=pytest.mark.nightly),
    ],
)
def test_its_text_is_that_of_its_own_generate(architecture: str, compiles: bool, drafter: str) -> None:
    model = packed_model(architecture)
    with FileLock(cache_dir() / "packed.lock"):
        target = TargetModel(model, ModelOptions(compile=compiles))
        assert (target.compiled is not None) == compiles
    options: dict[str, Any] = {"drafter": DRAFTERS[drafter], "budget": "fixed", "batch_size": 2}
    engine = Engine.from_model(model, compile=compiles, **options)
    for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, 20, ignore_eos=True), strict=True):
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        right = model.generate(torch.tensor([prompt]), max_new_tokens=20, **settings)[0, len(prompt) :].tolist()
        assert [*done.token_ids] == right
    assert (engine.report.mean_acceptance_length > 1) == (drafter != "none")
    if compiles:
        got, expected = (short_pass(target, run)[0] for run in (target.compiled, target.run))
        assert torch.allclose(got, expected, atol=0.05 * float(expected.std()))
        assert target.why_not_invariant is None


@pytest.mark.usefixtures("kernels")
def test_int8_packs_linear_layers_and_what_shares_their_weights() -> None:
    model = opt(dtype=torch.float32)
    linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
    assert round_weights(model) == sum(part.weight.numel() for part in linears)
    assert all(type(part) is PackedLinear for part in linears)
    assert type(model.get_input_embeddings()) is PackedEmbedding
    assert round_weights(model) == 0


def test_without_a_kernel_a_model_gets_the_numbers_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, why in ((torch.float64, None), (torch.float32, "no compiler")):
        monkeypatch.setattr(packed, "why_unavailable", lambda why=why: why)
        module = nn.Linear(33, 5, dtype=dtype)
        right = rounded(module.weight.detach(), 8).dense(dtype)
        before = module.weight
        round_drafter(module)
        assert module.weight is before, "what drafts stays as it is"
        round_weights(module)
        assert type(module) is nn.Linear
        assert torch.equal(module.weight, right)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int4"}, "model.weights is 'int4'; choose auto, "),
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
    model = nn.Linear(1, 1)
    model.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ConfigError, match=message):
        round_weights(model)


def test_a_job_goes_on_only_with_the_same_weights() -> None:
    before, now = "model: {path: demo, dtype: auto}", "model: {path: demo, dtype: auto, weights: %s}"
    assert changed_options(before, now % "auto") == [], "a folder of before there was a choice"
    assert changed_options(before, now % "int8") == ["model.weights"]


@pytest.mark.usefixtures("kernels")
def test_a_packed_model_is_not_saved(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="a packed model cannot be saved; save the model that it was made of"):
        packed_model("llama").save_pretrained(tmp_path)


@pytest.mark.usefixtures("kernels")
def test_copies_and_other_dtypes_of_a_packed_model_stay_packed() -> None:
    model, ids = packed_model("gemma3_text"), torch.tensor(PROMPTS[:1])
    twin, wide = copy.deepcopy(model), copy.deepcopy(model).float()
    with pytest.raises(ConfigError, match=r"in float32 or bfloat16, not on cpu in torch\.float16; load .*=dense"):
        model.half()
    with torch.no_grad():
        right, same, close = (one(ids).logits for one in (model, twin, wide))
    assert torch.equal(same, right)
    assert (close - right).std() < 0.05 * right.std()
    for one in (twin, wide):
        head, table = one.get_output_embeddings(), one.get_input_embeddings()
        assert head.weight is table.weight is not model.lm_head.weight
        assert head.panels is table.panels is not model.lm_head.panels
        assert head.weight.untyped_storage().nbytes() == head.weight.element_size()
    assert wide.lm_head.weight.dtype == torch.float32
