"""`model.compile`: the compiled forward pass computes what the model does, is kept on disk, and leaves the model alone.

Oracle: the model itself, uncompiled, with the same attention; and `greedy_reference`, in float64. Compiling takes some
ten seconds a model, so there are few, and test processes share what they compile.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emssd_draft_model import DraftModelConfig
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference
from transformers import LlamaForCausalLM

from emssd.decoding.check import compare
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.errors import ConfigError
from emssd.model import ModelOptions, TargetModel, load_model
from emssd.model.compile import tracing
from emssd.model.compile.packed import PackedLinear
from emssd.model.compile.program import declare_operators
from tests.model.test_checkpoint import save_checkpoint
from tests.support.backends import CONFIGS
from tests.support.draft_models import same_weights_drafter

from .conftest import LLMA, MODELS, PROMPTS, VOCAB_SIZE, assert_close, attend_apart, gemma2, opt

BACKENDS = {name: CONFIGS[name] for name in ("fused", "torch", "padded", "unpad_inputs")}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def _kernels(kernels: None) -> None:
    """All of these tests need them."""


@torch.inference_mode()
def both(target: TargetModel, num_rows: int, num_tokens: int, keep: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[num_rows, len(keep), vocab]`` of random tokens, by the program and by the model."""
    ids = torch.randint(0, VOCAB_SIZE, (num_rows, num_tokens), generator=torch.Generator().manual_seed(num_tokens))
    positions = torch.arange(num_tokens).expand(num_rows, -1).contiguous()
    arguments = ids, positions, attend_apart(num_rows), torch.tensor(keep)
    assert target.compiled is not None
    return target.compiled(*arguments), target.run(*arguments)


@EVERY_MODEL
def test_logits_are_those_of_the_model_for_any_number_of_tokens_rows_and_logits(
    name: str, targets: dict[str, TargetModel]
) -> None:
    target = targets[name]
    for num_rows, num_tokens, keep in [
        (1, 1, [0]),
        (1, 2, [1]),
        (1, 24, list(range(20))),  # what it was traced with
        (1, 50, [0, 7, 49]),
        (1, 64, list(range(64))),
        (3, 7, [0, 4, 6]),
        (4, 1, [0]),
        (2, 33, [32]),
    ]:
        got, right = both(target, num_rows, num_tokens, keep)
        assert_close(got, right)
        assert float(right.std()) > 0.3  # else closeness would say little


def engine_of(target: TargetModel, drafter: str, backend: Any) -> Engine:
    chosen: Any = {"llma": LLMA, "none": "none"}.get(drafter) or same_weights_drafter(target, backend)
    options = EngineOptions(batch_size=len(PROMPTS))
    return Engine.assemble(target, None, drafter=chosen, backend=backend, budget="fixed", options=options, eos=())


@pytest.mark.parametrize("drafter", ["none", "llma", "draft_model"])
@pytest.mark.parametrize("backend", BACKENDS)
@EVERY_MODEL
def test_tokens_are_those_of_greedy_decoding(
    name: str, backend: str, drafter: str, targets: dict[str, TargetModel]
) -> None:
    engine = engine_of(targets[name], drafter, BACKENDS[backend])
    done = engine.generate(PROMPTS, 24)
    if drafter != "none":
        assert engine.report.num_accepted > 0
    if targets[name].dtype is torch.float64:
        for generation, prompt in zip(done, PROMPTS, strict=True):
            assert list(generation.token_ids) == greedy_reference(targets[name].model, prompt, 24)
        return
    plain = TargetModel(MODELS[name]())
    greedy = engine_of(plain, "none", BACKENDS["torch"])
    report = compare(done, greedy.generate(PROMPTS, 24), greedy.runner)
    assert report.true_differences == []


@EVERY_MODEL
def test_the_model_is_left_as_it_was(name: str, targets: dict[str, TargetModel]) -> None:
    model, untouched = targets[name].model, MODELS[name]()
    assert model.config._attn_implementation == untouched.config._attn_implementation != "emssd"
    assert model.config.to_dict() == untouched.config.to_dict()
    assert [key for key, _ in model.named_modules()] == [key for key, _ in untouched.named_modules()]
    parameters = dict(untouched.named_parameters())
    assert [key for key, _ in model.named_parameters()] == list(parameters)  # tied ones are still one
    for key, parameter in model.named_parameters():
        assert type(parameter) is torch.nn.Parameter
        assert parameter.requires_grad
        assert torch.equal(parameter, parameters[key])
    assert model.state_dict().keys() == untouched.state_dict().keys()
    prompt = torch.tensor([PROMPTS[0]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 9}
    assert torch.equal(model.generate(prompt, **options), untouched.generate(prompt, **options))
    model(input_ids=prompt, labels=prompt).loss.backward()
    assert next(model.parameters()).grad is not None
    model.zero_grad()


@pytest.fixture
def no_compiling(targets: dict[str, TargetModel], monkeypatch: pytest.MonkeyPatch) -> None:
    assert targets["opt-float32"]
    monkeypatch.setattr(tracing, "compile_program", lambda *arguments: pytest.fail("it compiles again"))


@pytest.mark.usefixtures("no_compiling")
def test_a_program_on_disk_serves_any_weights_each_with_its_own() -> None:
    """As of a draft model with the shapes of its target."""
    first, second = (TargetModel(opt(seed), ModelOptions(compile=True)) for seed in (0, 1))
    results = [both(target, 1, 9, [3, 8]) for target in (first, second, first)]
    for got, right in results:
        assert_close(got, right)
    assert torch.equal(results[0][0], results[2][0])
    assert not torch.allclose(results[0][0], results[1][0], atol=0.1)


@pytest.mark.usefixtures("no_compiling")
def test_buffers_are_the_models_own_too() -> None:
    """As rotary frequencies that were scaled by hand: they are in no checkpoint, and so small that they become code."""
    model = gemma2()
    before = both(TargetModel(model, ModelOptions(compile=True)), 1, 40, [39])[0]
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer *= 0.1
    got, right = both(TargetModel(model, ModelOptions(compile=True)), 1, 40, [39])
    assert_close(got, right)
    assert not torch.allclose(got, before, atol=0.1)


@pytest.mark.usefixtures("no_compiling")
def test_an_error_within_attention_passes_through_and_the_next_step_is_right() -> None:
    target = TargetModel(opt(), ModelOptions(compile=True))
    broken = Mock(side_effect=MemoryError("out of memory"))
    assert target.compiled is not None
    ids = torch.arange(5).unsqueeze(0)
    with pytest.raises(MemoryError, match=r"^out of memory$"):
        target.compiled(ids, ids, broken, torch.tensor([0]))
    assert_close(*both(target, 1, 5, [0, 4]))


@pytest.mark.parametrize(
    ("architecture", "others"), [("gpt2", []), ("llama", []), ("qwen2_moe", ["grouped_mm_fallback"])]
)
def test_products_that_no_kernel_of_ours_computes_are_named(
    architecture: str, others: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of GPT-2's are linear layers, though it calls ``addmm``; experts are none."""
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda *arguments, **options: None)
    declare_operators()
    experts = {"num_experts": 4, "num_experts_per_tok": 2} if others else {}
    target = TargetModel(tiny_model(architecture, dtype=torch.float32, num_hidden_layers=1, **experts))
    tracing.compile_program(target, tmp_path)
    assert json.loads((tmp_path / tracing.LINEARS).read_text())["others"] == others


def test_a_program_that_calls_other_products_says_that_it_is_not_batch_invariant(
    targets: dict[str, TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets["opt-float32"]
    assert target.compiled is not None
    assert target.why_not_invariant is None
    monkeypatch.setattr(target.compiled._program, "other_products", ["bmm", "mm"])
    assert target.why_not_invariant == "its program calls bmm, mm"


class LooksAtItsTokens(LlamaForCausalLM):
    """Computes by the values of its input, which no trace can follow."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:  # type: ignore[override]
        if int(input_ids.sum()) < 0:
            raise AssertionError("no token is negative")
        return super().forward(input_ids=input_ids, **options)


def test_a_model_that_cannot_be_traced_runs_as_it_is_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMSSD_CACHE", str(tmp_path))
    model = LooksAtItsTokens(tiny_model("llama").config).eval()
    plain = model.config._attn_implementation
    with pytest.warns(RuntimeWarning, match="the model runs without model.compile: LooksAt.* cannot be") as caught:
        engine = Engine.from_model(model, drafter=LLMA, backend="ragged", batch_size=4, compile=True)
    (message,) = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert re.fullmatch(r".*: LooksAtItsTokens cannot be compiled: \w+: .+", message)  # in one line
    assert engine.target.compiled is None
    assert model.config._attn_implementation == plain
    expected = Engine.from_model(model, drafter="none", backend="ragged", batch_size=4).generate(PROMPTS, 9)
    assert [row.token_ids for row in engine.generate(PROMPTS, 9)] == [row.token_ids for row in expected]
    assert not (tmp_path / "models").exists()


def test_a_drafters_model_is_compiled_and_rounded_if_the_target_is_compiled(
    targets: dict[str, TargetModel], tmp_path: Path
) -> None:
    plain = opt()
    save_checkpoint(tmp_path, "opt", num_hidden_layers=1, max_model_len=64)
    options = ModelOptions(str(tmp_path), dtype="float32", compile=False)
    for target, is_compiled in ((targets["opt-float32"], True), (TargetModel(plain), False)):
        draft, _ = load_model(options, draft_of=target)
        assert (draft.may_compile, type(draft.model.lm_head) is PackedLinear) == (is_compiled, is_compiled)
    assert type(load_model(replace(options, compile=True))[0].model.lm_head) is torch.nn.Linear


def test_a_target_is_not_compiled_for_a_drafter_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EMSSD_CACHE", str(tmp_path))
    monkeypatch.setattr(tracing, "compile_program", lambda *arguments: pytest.fail("it compiles"))
    target = TargetModel(opt(), ModelOptions(compile=True))
    with pytest.raises(ConfigError, match="there is no such folder"):
        Engine.assemble(target, None, drafter=DraftModelConfig(str(tmp_path / "none")), backend="ragged")
