"""Who owns a model: a borrowed one may change between runs in any way; an owned one that changes is refused.

Oracle: `greedy_reference`, the model's own eager forward in float64, after the change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from threading import Event, Thread
from typing import Any

import pytest
import torch
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference
from torch import nn
from transformers import PreTrainedModel

from emssd import Engine
from emssd.attention import LayerSpec
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.model import TargetModel
from emssd.model.hf.probe import ProbeRows
from emssd.model.hf.tripwire import Structure, changed
from tests.attack.changes import CHANGES as RANDOM

PROMPT = tuple(3 + i * i % 10 for i in range(40))  # more than two pages, which the next run adopts
NEW_TOKENS = 8
SEED = 7  # with which each random change changes tokens


def llama(seed: int = 0) -> PreTrainedModel:
    return tiny_model("llama", dtype=torch.float64, num_hidden_layers=2, vocab_size=13, max_model_len=64, seed=seed)


def mlp(model: Any) -> Any:
    return model.model.layers[0].mlp


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        twice: torch.Tensor = -2 * self.inner(x)
        return twice


CHANGES: dict[str, Callable[[Any], object]] = {
    **{name: lambda model, change=change: change(model, Random(SEED)) for name, change in RANDOM.items()},
    "another tensor": lambda model: setattr(
        mlp(model).down_proj, "weight", nn.Parameter(-mlp(model).down_proj.weight.data)
    ),
    "a clamp of large values": lambda model: mlp(model).register_forward_hook(lambda *args: args[-1].clamp(-0.1, 0.1)),
    "an activation": lambda model: setattr(mlp(model), "act_fn", nn.Tanh()),
    "a forward of its own": lambda model: setattr(mlp(model), "forward", Twice(copy.copy(mlp(model))).forward),
    "a number": lambda model: (
        setattr(model.model.layers[1].self_attn, "attention_dropout", 0.0)
        or setattr(model.model.layers[0].post_attention_layernorm, "variance_epsilon", 900.0)
    ),
    "other weights of the same model": lambda model: setattr(mlp(model), "up_proj", mlp(model).gate_proj),
}


def tokens(engine: Engine) -> list[list[int]]:
    return [[*row.token_ids] for row in engine.generate([PROMPT, PROMPT[:20]], NEW_TOKENS, ignore_eos=True)]


def right(model: PreTrainedModel) -> list[list[int]]:
    return [greedy_reference(model, prompt, NEW_TOKENS) for prompt in (PROMPT, PROMPT[:20])]


@pytest.mark.parametrize("what", CHANGES)
def test_a_run_after_a_change_is_that_of_the_model_as_it_is(what: str) -> None:
    model = llama()
    engine = Engine.from_model(model)
    before = tokens(engine)
    assert before == right(model)
    CHANGES[what](model)
    assert tokens(engine) == right(model) != before
    assert tokens(engine) == right(model)


UNSEEN = {"fused optimizer", ".data written", "numpy", "a number"}


@pytest.mark.parametrize("what", CHANGES)
def test_an_owned_model_that_was_changed_is_refused_until_it_is_refreshed(what: str) -> None:
    model = llama()
    engine = Engine.from_model(model, frozen=True)
    before = tokens(engine)
    assert before == right(model) == tokens(engine)
    assert engine.report.num_adopted_tokens > 0
    CHANGES[what](model)
    if what not in UNSEEN:
        with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM was changed .* call engine\.refresh\(\)"):
            tokens(engine)
    engine.refresh()
    assert tokens(engine) == right(model) != before


class Parts(torch.Tensor):
    """As a quantized tensor, or a shard with its mesh of devices."""

    part: torch.Tensor
    mesh: object

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["part", "mesh"], None


def test_a_tensor_that_is_made_of_parts_is_seen_by_these() -> None:
    model, tensor = llama(), torch.zeros(2).as_subclass(Parts)
    tensor.part, tensor.mesh = torch.zeros(2), object()
    mlp(model).register_buffer("parts", tensor)
    before = Structure(model)
    assert changed(before.tensors, Structure(model).tensors) is None
    tensor.part.add_(1)
    assert changed(before.tensors, Structure(model).tensors) == "model.layers.0.mlp.parts"


def test_an_engine_that_decodes_is_not_refreshed() -> None:
    engine = Engine.from_model(llama())
    running = engine.stream([PROMPT, PROMPT[:20]], [NEW_TOKENS, 2], ignore_eos=True)
    next(running)
    with pytest.raises(ConfigError, match="this engine is decoding"):
        engine.refresh()


def test_a_class_whose_forward_is_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    engine = Engine.from_model(model)
    tokens(engine)
    forward = type(mlp(model)).forward
    monkeypatch.setattr(type(mlp(model)), "forward", lambda self, x: -forward(self, x))
    assert tokens(engine) == right(model)


def test_adapters_that_are_added_set_disabled_and_merged_are_noticed() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model: Any = llama()
    engine = Engine.from_model(model)
    seen = [tokens(engine)]

    def add(name: str) -> None:
        config = peft.LoraConfig(r=2, target_modules=["down_proj", "o_proj"], init_lora_weights=False, lora_alpha=64)
        model.add_adapter(config, name)
        model.eval()

    for change in (
        lambda: add("one"),
        lambda: add("two"),
        lambda: model.set_adapter("one"),
        lambda: model.disable_adapters(),
        lambda: model.enable_adapters(),
        lambda: [part.merge() for part in model.modules() if isinstance(part, peft.tuners.tuners_utils.BaseTunerLayer)],
    ):
        change()
        seen.append(tokens(engine))
        assert seen[-1] == right(model)
    assert seen[0] == seen[4] != seen[1] != seen[2] != seen[3]


def test_calls_that_leave_an_owned_model_as_it_is_keep_its_prefixes() -> None:
    model = llama()
    engine = Engine.from_model(model, frozen=True)
    tokens(engine)
    ids = torch.tensor([PROMPT])
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=3)  # type: ignore[operator]
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    model.eval()
    model.set_attn_implementation("eager")
    tokens(engine)
    assert engine.report.num_adopted_tokens > 0


def test_a_model_in_training_mode_is_refused_until_it_is_in_evaluation_mode() -> None:
    model = tiny_model("opt", dtype=torch.float64, vocab_size=13, max_model_len=64)
    engine = Engine.from_model(model, frozen=True)
    model.train()
    with pytest.raises(UnsupportedModelError, match=r"OPTForCausalLM is in training mode, .*; call model\.eval\(\)"):
        tokens(engine)
    model.eval()
    assert tokens(engine) == right(model)
    engine = Engine.from_model(model)
    model.model.decoder.layers[1].train()  # which no flag of the whole model tells
    with pytest.raises(UnsupportedModelError, match=r"is in training mode in model\.decoder\.layers\.1, "):
        tokens(engine)


@pytest.mark.parametrize(
    "change", [lambda model: model.float(), lambda model: (model.resize_token_embeddings(17), model.eval())]
)
def test_another_model_altogether_is_refused(change: Callable[[Any], object]) -> None:
    model = llama()
    engine = Engine.from_model(model)
    tokens(engine)
    change(model)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=r"this engine was made for torch\.float64 .* make the engine"):
            tokens(engine)


def in_a_pass(target: TargetModel, act: Callable[[], object]) -> torch.Tensor:
    """Logits of a pass of `target`; `act` is called within its first layer."""
    rows = ProbeRows(target)

    def attend(layer: int, seen: LayerSpec, *qkv: torch.Tensor) -> torch.Tensor:
        if layer == 0:
            act()
        return rows.attend(layer, seen, *qkv)

    with torch.inference_mode():
        return target.run(rows.tokens[None], rows.positions[None], attend)


def thread(act: Callable[[], object]) -> Thread:
    (started := Thread(target=act, daemon=True)).start()
    return started


def test_the_users_own_calls_in_another_thread_are_right_during_a_pass() -> None:
    model, outputs = llama(), list[torch.Tensor]()
    target, ids = TargetModel(model), torch.tensor([PROMPT])
    with torch.no_grad():
        expected = model(ids).logits
        streams = target.prepare_hidden([1])
        hidden = {1: torch.empty(0)}

        def call() -> None:
            with torch.no_grad():
                outputs.append(model(ids).logits)

        with streams.taken(hidden):
            in_a_pass(target, lambda: thread(call).join())
        assert hidden[1].shape[1] == ProbeRows(target).num_tokens
    assert torch.equal(outputs[0], expected)
    assert model.config._attn_implementation == "sdpa"


def test_passes_of_two_engines_in_two_threads_follow_one_another() -> None:
    model = llama()
    one, other = TargetModel(model), TargetModel(model)
    alone = in_a_pass(one, lambda: None)
    inside, first_is_done, outputs = Event(), Event(), list[torch.Tensor]()

    def second() -> None:
        outputs.append(in_a_pass(other, lambda: inside.set() or first_is_done.wait(5)))

    def first() -> None:
        threads.append(thread(second))
        inside.wait(0.2)

    threads: list[Thread] = []
    outputs.append(in_a_pass(one, first))
    first_is_done.set()
    threads[0].join()
    assert len(outputs) == 2
    assert all(torch.equal(logits, alone) for logits in outputs)
    assert model.config._attn_implementation == "sdpa"


def test_an_exception_in_a_pass_leaves_the_model_as_it_was() -> None:
    model = llama()
    target = TargetModel(model)
    streams, hidden = target.prepare_hidden([0, 1, -1]), {0: torch.empty(0), 1: torch.empty(0), -1: torch.empty(0)}
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(MemoryError), streams.taken(hidden), streams.cut(1):
        in_a_pass(target, lambda: (_ for _ in ()).throw(MemoryError()))
    assert [dict(vars(module)) for module in model.modules()] == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_a_path_in_the_place_of_a_loaded_model() -> None:
    with pytest.raises(ConfigError, match=r"takes a loaded model; Engine\.from_pretrained\('demo'\) loads one"):
        Engine.from_model("demo")
