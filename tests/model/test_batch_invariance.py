"""`batch_invariant`: a trainer's forward pass has the bits of a rollout, and the gradients of the model."""

from __future__ import annotations

import os
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from emssd_none import NoneDrafter
from emssd_ragged.backend import ragged_backend
from emssd_testing.drafters import PerfectDrafter, RandomDrafter, TreeDrafter
from emssd_testing.models import tiny_model
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from emssd.attention import LayerSpec
from emssd.drafting import Drafter
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.integrations.batch_invariant import batch_invariant
from emssd.model import ModelOptions, TargetModel
from emssd.model.hf.batch_invariance import Audit, BatchInvariant
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request
from tests.support.backends import engine_of, runner_of
from tests.support.tiers import looped, only

VOCAB = 23
ROLLED_OUT = [(1, 2, 3), (4,) * 19, (5, 6)]
TRAINED = ("llama", "gpt2", "gemma2")
CHOSEN_TRAINED = [("llama", torch.float32), ("gpt2", torch.bfloat16), ("gemma2", torch.float64)]
CHECKPOINTS = [*product(TRAINED, (False, True))]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def make_model(architecture: str, dtype: torch.dtype) -> Any:
    return tiny_model(architecture, dtype=dtype, vocab_size=VOCAB, max_model_len=96, std=0.12)


def rollouts(model: Any) -> list[Generation]:
    engine = engine_of(
        TargetModel(model, ModelOptions(batch_invariant=True, compile=False)), RandomDrafter(VOCAB, 4), ragged_backend()
    )
    params = SamplingParams(temperature=1.0, seed=3, logprobs=0)
    requests = [Request(str(row), ids, 9, sampling=params) for row, ids in enumerate(ROLLED_OUT)]
    done = {row.request_id: row for row in engine.run(requests)}
    return [done[str(row)] for row in range(3)]


def padded(done: list[Generation], left: bool) -> dict[str, torch.Tensor]:
    rows = [(*row.prompt_ids, *row.token_ids) for row in done]
    width = max(map(len, rows)) + 2
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for row, tokens in enumerate(rows):
        columns = slice(width - len(tokens), width) if left else slice(len(tokens))
        ids[row, columns], mask[row, columns] = torch.tensor(tokens), 1
    return {"input_ids": ids, "attention_mask": mask}


def logprobs(logits: torch.Tensor, row: Generation) -> list[float]:
    """Log-probabilities of a row's new tokens from its logits ``[n, vocab]``."""
    start = len(row.prompt_ids) - 1
    scores = logits.detach()[start : start + len(row.token_ids)].double().log_softmax(-1)
    return scores.gather(1, torch.tensor(row.token_ids)[:, None])[:, 0].tolist()


def of_a_batch(logits: torch.Tensor, batch: dict[str, torch.Tensor], done: list[Generation]) -> list[list[float]]:
    """The same of all rows of a padded batch."""
    return [logprobs(logits[i][batch["attention_mask"][i] == 1], row) for i, row in enumerate(done)]


@pytest.mark.parametrize(("architecture", "dtype"), only([*product(TRAINED, DTYPES)], ci=CHOSEN_TRAINED))
def test_log_probabilities_of_a_trainer_are_those_of_the_rollout(architecture: str, dtype: torch.dtype) -> None:
    model = make_model(architecture, dtype)
    done = rollouts(model)
    expected = [[token.logprob for token in row.logprobs or ()] for row in done]
    rows = [torch.tensor([*row.prompt_ids, *row.token_ids]) for row in done]
    with batch_invariant(model):
        for left in (True, False):
            batch = padded(done, left)
            assert of_a_batch(model(**batch).logits, batch, done) == expected
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        packed = model(input_ids=torch.cat(rows)[None], position_ids=positions).logits[0]
    assert [*map(logprobs, packed.split([*map(len, rows)]), done)] == expected
    assert "forward" not in vars(model)


def test_adapters_are_trained_with_the_bits_of_the_rollout() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: nox -s trl")
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0, init_lora_weights=False)
    model = peft.get_peft_model(make_model("llama", torch.bfloat16), adapters).eval()
    done = rollouts(model.get_base_model())
    with batch_invariant(model):
        batch = padded(done, True)
        logits = model(**batch).logits
        logits.sum().backward()
    assert of_a_batch(logits, batch, done) == [[token.logprob for token in row.logprobs or ()] for row in done]
    trained = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert trained == {name for name, weight in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize(
    ("architecture", "checkpointing"), only(CHECKPOINTS, ci=[("llama", True), ("gpt2", False), ("gemma2", False)])
)
def test_gradients_are_those_of_the_model(architecture: str, checkpointing: bool) -> None:
    model = make_model(architecture, torch.float64).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.set_attn_implementation("eager" if architecture == "gemma2" else "sdpa")
    ids, mask = torch.arange(30).view(2, 15) % VOCAB, torch.ones(2, 15, dtype=torch.long)
    mask[0, 11:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if checkpointing:
        model.gradient_checkpointing_enable()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        output = model(**batch)
        (output.loss + output.logits[mask == 1].pow(2).mean()).backward()  # no label follows the last token
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    plain = gradients()
    with batch_invariant(model):
        ours = gradients()
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # norms and softmax are float32 in some
    assert model.training


def test_what_cannot_be() -> None:
    with (
        pytest.raises(UnsupportedModelError, match="not batch-invariant: no kernel computes float16"),
        batch_invariant(make_model("llama", torch.float16)),
    ):
        pass
    model = make_model("llama", torch.float32)
    with batch_invariant(model), pytest.raises(ConfigError, match="positions count from 0"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long), position_ids=torch.tensor([[3, 4, 5, 6]]))


CHOSEN = [("llama", torch.float32), ("gpt2", torch.bfloat16), ("gemma2", torch.float64), ("qwen2_moe", torch.float32)]
EXAMPLES = int(os.environ.get("EMSSD_BITS_EXAMPLES", "0"))
COMPILED = [("compiled llama", torch.float32), ("compiled llama", torch.bfloat16)]
ARCHITECTURES = ("llama", "gpt2", "opt", "gemma2", "qwen3", "gpt_neox", "phi", "qwen2_moe")


@cache
def target(architecture: str, dtype: torch.dtype) -> TargetModel:
    compiled = architecture.startswith("compiled ")
    name = architecture.removeprefix("compiled ")
    model = tiny_model(name, dtype=dtype, vocab_size=VOCAB, max_model_len=96, std=0.12)
    served = TargetModel(model, ModelOptions(batch_invariant=not compiled, compile=compiled))
    assert (served.compiled is not None) == compiled
    return served


def requests() -> list[Request]:
    kinds = [
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(temperature=1.2, seed=3, logprobs=0),
        SamplingParams(temperature=0.8, top_k=5, seed=4, repetition_penalty=1.3, logprobs=1, processed_logprobs=True),
    ]
    prompts: list[tuple[int, ...]] = [(1, 2, 3), (4,) * 19, tuple(range(1, 22)), (5, 6), (4,) * 17 + (5,)]  # 2 share KV
    return [Request(f"r{number}", ids, 12, sampling=kinds[number % len(kinds)]) for number, ids in enumerate(prompts)]


def decoded(served: TargetModel, drafter: Drafter, batch_size: int, **options: Any) -> dict[str, Any]:
    """By request, tokens and log-probabilities."""
    engine = engine_of(served, drafter, ragged_backend(), batch_size, trees=True, **options)
    assert engine.runner.batch_invariance == "yes"
    return {row.request_id: (row.token_ids, row.logprobs) for row in engine.run(requests())}


@cache
def alone(architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    return decoded(target(architecture, dtype), NoneDrafter(), 1)


def drafted(kind: str, texts: dict[str, tuple[int, ...]]) -> Drafter:
    if kind == "none":
        return NoneDrafter()
    return {"perfect": PerfectDrafter, "random": RandomDrafter, "trees": TreeDrafter}[kind](VOCAB, 5, texts)


@pytest.mark.parametrize(("architecture", "dtype"), only([*product(ARCHITECTURES, DTYPES), *COMPILED], ci=CHOSEN))
@settings(max_examples=EXAMPLES or 1, phases=[Phase.explicit, Phase.generate][: 2 if EXAMPLES else 1], deadline=None)
@example(kind="trees", batch_size=4, tokens_a_step=13, max_tokens=112)
@given(
    kind=st.sampled_from(["none", "perfect", "random", "trees"]),
    batch_size=st.integers(1, 5),
    tokens_a_step=st.sampled_from([8, 13, 64]),
    max_tokens=st.sampled_from([None, 112]),
)
def test_tokens_and_log_probabilities_are_those_of_a_row_alone(
    architecture: str, dtype: torch.dtype, kind: str, batch_size: int, tokens_a_step: int, max_tokens: int | None
) -> None:
    expected = alone(architecture, dtype)
    texts = {name: tokens for name, (tokens, _) in expected.items()}
    options = {"max_step_tokens": tokens_a_step, "max_tokens": max_tokens, "prefix_caching": True}
    assert decoded(target(architecture, dtype), drafted(kind, texts), batch_size, **options) == expected


@pytest.mark.parametrize("requested", [False, True])
def test_without_the_option_passes_are_pytorchs_own(requested: bool) -> None:
    served = TargetModel(tiny_model("llama", vocab_size=VOCAB), ModelOptions(batch_invariant=requested, compile=False))
    answer = "yes" if requested else "no: model.batch_invariant=false"
    assert runner_of(served, ragged_backend()).batch_invariance == answer
    modes = set[int]()

    def attend(layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
        modes.add(torch._C._len_torch_function_stack())
        return torch.zeros_like(qkv[0])

    served.run(torch.ones(1, 3, dtype=torch.long), torch.arange(3)[None], attend)
    assert modes == {int(requested)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 96])
def test_what_is_replaced_gives_a_row_its_bits_in_any_batch(size: int, dtype: torch.dtype) -> None:
    import torch.nn.functional as F

    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, size, generator=generator).to(dtype) for n in (40, 70))
    bias, flipped = torch.randn(70, generator=generator).to(dtype), weight.t().contiguous()
    functions = (lambda x: F.linear(x, weight, bias), lambda x: torch.addmm(bias, x, flipped), lambda x: x @ flipped,
                 F.silu, F.gelu, torch.sigmoid, F.softplus)  # fmt: skip
    with BatchInvariant() as arithmetic, Audit(arithmetic):
        for function in functions:
            whole = function(rows)
            for start, stop in ((0, 1), (3, 5), (7, 24), (39, 40)):
                assert torch.equal(function(rows[start:stop]), whole[start:stop])
    assert not arithmetic.missed
    torch.testing.assert_close(F.linear(rows, weight, bias), functions[0](rows))


SQUARE = torch.eye(32, dtype=torch.float64) + 0.25
UNKNOWN: dict[str, Any] = {  # by the operator that is named
    "inner": lambda x: torch.inner(x, SQUARE),
    "einsum": lambda x: torch.einsum("bni,bji->bnj", x, SQUARE[None]),
    "mv": lambda x: torch.mv(x[0], SQUARE[0])[None, :, None],
    "addmm": lambda x: torch.addmm(SQUARE[:1], x[0], SQUARE, beta=0.5),
    "cdist": lambda x: torch.cdist(x, SQUARE[None]),
    "conv1d": lambda x: torch.conv1d(x.mT, SQUARE[:, :, None]).mT,
    "linear": lambda x: torch.ops.aten.linear(x, SQUARE),
    "pow": lambda x: x.abs().pow(1.5),
    "exp2": torch.exp2,
    "atan2": lambda x: torch.atan2(x, x + 1),
    "logaddexp": lambda x: torch.logaddexp(x, x + 1),
    "special_expit": torch.special.expit,
    "sigmoid_": lambda x: (2 * x).sigmoid_(),
    "rsqrt": lambda x: x.abs().bfloat16().rsqrt(),
    "var": lambda x: x.var(-1, keepdim=True),
}


@looped("name", UNKNOWN)
def test_an_operator_that_is_not_known_to_keep_bits_is_named(name: str) -> None:
    model = tiny_model("llama", vocab_size=VOCAB)
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: forward(hidden) + UNKNOWN[name](hidden)
    target = TargetModel(model, ModelOptions(batch_invariant=True, compile=False))
    assert f"it calls {name}" in str(target.why_not_invariant)
