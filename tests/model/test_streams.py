"""Hidden states, embeddings, norm and LM head of a target: what drafters get is what the model itself computes.

Oracle: Transformers' own forward with `output_hidden_states=True`, float64, the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from emssd_testing.models import ARCHITECTURES, tiny_model
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from emssd.errors import UnsupportedModelError
from emssd.model import BorrowedTarget, TargetModel
from tests.support.tiers import looped

VOCAB_SIZE = 61
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])

MODELS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: tiny_model(name) for name in ARCHITECTURES},  # type: ignore[misc]
    "opt-projected": lambda: tiny_model("opt", word_embed_proj_dim=16),
    "opt-without-norm": lambda: tiny_model("opt", do_layer_norm_before=False),
    "gemma2-capped": lambda: tiny_model("gemma2", final_logit_softcapping=3.0),
    "gemma3": lambda: tiny_model("gemma3_text", final_logit_softcapping=3.0),
    "granite": lambda: tiny_model(
        "granite", embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.3, attention_multiplier=0.1
    ),
    "cohere": lambda: tiny_model("cohere", logit_scale=0.07),
    "mixtral-float32": lambda: tiny_model("mixtral").float(),
    "gemma3-bfloat16": lambda: tiny_model("gemma3_text").bfloat16(),
}
ADDS_POSITIONS = {"opt", "opt-projected", "opt-without-norm", "gpt2"}


@cache
def target(name: str) -> TargetModel:
    return TargetModel(MODELS[name]())


@torch.inference_mode()
def states_of(name: str) -> dict[int, torch.Tensor]:
    """All hidden states of the tokens, taken beside the model's own call."""
    streams = target(name).prepare_hidden([0])
    into = dict.fromkeys([*range(len(streams.layers) + 1), -1], IDS)
    with streams.taken(into):
        target(name).model(IDS[None], use_cache=False)
    return {index: states[0] for index, states in into.items()}


@looped("name", MODELS)
def test_hidden_states_are_those_of_transformers(name: str) -> None:
    states, last = states_of(name), len(target(name).layers)
    with torch.inference_mode():
        theirs = target(name).model(IDS[None], output_hidden_states=True, use_cache=False).hidden_states
    assert len(theirs) == last + 1
    for index, right in enumerate(theirs[:-1]):
        assert torch.equal(states[index], right[0]), index
    assert torch.equal(states[-1], theirs[-1][0])
    assert states[0].dtype is target(name).dtype
    for index in range(last):  # each index is another stream
        assert float((states[index] - states[index + 1]).abs().max()) > 0.1


@looped("name", MODELS)
@torch.inference_mode()
def test_what_is_borrowed_gives_the_models_own_logits(name: str) -> None:
    borrowed, states = BorrowedTarget(target(name)), states_of(name)
    logits = target(name).model(IDS[None], use_cache=False).logits[0]
    assert torch.equal(borrowed.norm(states[borrowed.num_layers]), states[-1])
    assert torch.equal(borrowed.project(states[-1]), logits)
    assert torch.equal(borrowed.logits(IDS), logits)
    torch.testing.assert_close(borrowed.project(states[-1][2:3]), logits[2:3])
    assert not torch.allclose(borrowed.project(states[-1] * 2), logits, atol=0.1)
    assert (borrowed.vocab_size, borrowed.hidden_size, borrowed.num_layers) == (VOCAB_SIZE, 32, 2)
    assert borrowed.config["vocab_size"] == VOCAB_SIZE
    assert (borrowed.dtype, borrowed.device) == (logits.dtype, logits.device)
    assert torch.equal(target(name).model(IDS[None], use_cache=False).logits[0], logits)  # left as it was


@looped("name", MODELS)
@torch.inference_mode()
def test_embeddings_are_those_of_the_first_layer_without_positions(name: str) -> None:
    borrowed, table = BorrowedTarget(target(name)), target(name).model.get_input_embeddings().weight
    embedded = borrowed.embed(IDS)
    assert torch.equal(borrowed.embed(IDS, raw=True), table[IDS])
    if name in ADDS_POSITIONS:
        assert torch.equal(embedded, table[IDS])
    else:
        torch.testing.assert_close(embedded, states_of(name)[0])
    scaled = name.startswith(("gemma", "granite"))
    assert torch.equal(embedded, table[IDS]) != scaled


class TwoTowers(LlamaForCausalLM):
    """A second list of layers with attention of the same numbers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.others = torch.nn.ModuleList(self.model.layers)


class Skips(GPT2LMHeadModel):
    """Its second layer is not given what the first one gave."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer.h[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))


@pytest.mark.parametrize(
    ("kind", "model", "reason"),
    [
        ("llama", TwoTowers, "it has 2 lists of 2 modules that could be its decoder layers"),
        ("gpt2", Skips, "layer 1 is not given what layer 0 gave"),
    ],
)
def test_a_model_whose_streams_are_not_found_is_refused_in_words(kind: str, model: Any, reason: str) -> None:
    target = TargetModel(model(tiny_model(kind).config).double().eval())
    with pytest.raises(UnsupportedModelError, match=f"^{model.__name__} gives drafters no hidden states: {reason}$"):
        target.prepare_hidden([1])


def test_a_stream_that_the_model_writes_to_later_is_copied_in_time() -> None:
    class InPlace(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.norm.register_forward_pre_hook(lambda module, args: (args[0].add_(1.0),))

    model = InPlace(tiny_model("llama").config).double().eval()
    streams, seen = TargetModel(model).prepare_hidden([2]), list[torch.Tensor]()
    hook = model.model.layers[1].register_forward_hook(lambda module, args, out: seen.append(out.clone()))
    into = {2: IDS}
    with torch.inference_mode(), streams.taken(into):
        model(IDS[None], use_cache=False)
    hook.remove()
    assert torch.equal(into[2], seen[0])
