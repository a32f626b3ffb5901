"""`batch_invariant`: a trainer's forward pass has the bits of a rollout, and the gradients of the model."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from emssd_ragged.backend import ragged_backend

from emssd.decoding.engine import Engine
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.integrations.batch_invariant import batch_invariant
from emssd.model import CausalLMRunner, TargetModel
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request
from emssd.testing.drafters import RandomDrafter
from emssd.testing.models import tiny_model
from tests.support.tiers import only

VOCAB = 23
PROMPTS = [(1, 2, 3), (4,) * 19, (5, 6)]
ARCHITECTURES = ("llama", "gpt2", "gemma2")
CHOSEN = [("llama", torch.float32), ("gpt2", torch.bfloat16), ("gemma2", torch.float64)]
CHECKPOINTS = [*product(ARCHITECTURES, (False, True))]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def make_model(architecture: str, dtype: torch.dtype) -> Any:
    return tiny_model(architecture, dtype=dtype, vocab_size=VOCAB, max_model_len=96, std=0.12)


def rollouts(model: Any) -> list[Generation]:
    runner = CausalLMRunner(target := TargetModel(model, batch_invariant=True), backend := ragged_backend())
    backend.allocate(target.kv_cache_spec(3))
    params = SamplingParams(temperature=1.0, seed=3, logprobs=0)
    requests = [Request(str(row), ids, 9, sampling=params) for row, ids in enumerate(PROMPTS)]
    done = {each.request_id: each for each in Engine(runner, RandomDrafter(VOCAB, 4), batch_size=3).run(requests)}
    return [done[str(row)] for row in range(3)]


def padded(done: list[Generation], left: bool) -> dict[str, torch.Tensor]:
    rows = [(*each.prompt_ids, *each.token_ids) for each in done]
    width = max(map(len, rows)) + 2
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for row, tokens in enumerate(rows):
        place = slice(width - len(tokens), width) if left else slice(len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(tokens), 1
    return {"input_ids": ids, "attention_mask": mask}


def shares(logits: torch.Tensor, each: Generation) -> list[float]:
    """Log-probabilities of a row's new tokens from its logits ``[n, vocab]``."""
    start = len(each.prompt_ids) - 1
    found = logits.detach()[start : start + len(each.token_ids)].double().log_softmax(-1)
    return [float(found[place, token]) for place, token in enumerate(each.token_ids)]


@pytest.mark.parametrize(("architecture", "dtype"), only([*product(ARCHITECTURES, DTYPES)], ci=CHOSEN))
def test_log_probabilities_of_a_trainer_are_those_of_the_rollout(architecture: str, dtype: torch.dtype) -> None:
    model = make_model(architecture, dtype)
    done = rollouts(model)
    expected = [[token.logprob for token in each.logprobs or ()] for each in done]
    rows = [torch.tensor([*each.prompt_ids, *each.token_ids]) for each in done]
    with batch_invariant(model):
        for left in (True, False):
            batch = padded(done, left)
            logits = model(**batch).logits
            found = [shares(logits[row][batch["attention_mask"][row] == 1], each) for row, each in enumerate(done)]
            assert found == expected
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        packed = model(input_ids=torch.cat(rows)[None], position_ids=positions).logits[0]
    found = [shares(part, each) for part, each in zip(packed.split([*map(len, rows)]), done, strict=True)]
    assert found == expected
    assert "forward" not in vars(model)


def test_adapters_are_trained_with_the_bits_of_the_rollout() -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0, init_lora_weights=False)
    model = peft.get_peft_model(make_model("llama", torch.bfloat16), adapters)
    done = rollouts(model.get_base_model())
    with batch_invariant(model):
        batch = padded(done, True)
        logits = model(**batch).logits
        logits.sum().backward()
    found = [shares(logits[row][batch["attention_mask"][row] == 1], each) for row, each in enumerate(done)]
    assert found == [[token.logprob for token in each.logprobs or ()] for each in done]
    grown = {name for name, each in model.named_parameters() if each.grad is not None}
    assert grown == {name for name, each in model.named_parameters() if "lora_" in name}


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
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    plain = gradients()
    with batch_invariant(model):
        found = gradients()
    assert len(found) == len(plain)
    for one, other in zip(found, plain, strict=True):
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
