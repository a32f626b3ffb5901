"""The key of a compiled program: every change of what a model computes gives another key, or is refused.

A key that stays would run another model's program: wrong tokens, without a word.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from emssd.errors import CompileError
from emssd.model import TargetModel
from emssd.model.fingerprint import fingerprint
from emssd.testing.models import ARCHITECTURES, tiny_model
from tests.support.tiers import looped

Change = Callable[[Any], object]


def llama(**options: Any) -> PreTrainedModel:
    chosen: dict[str, Any] = {"dtype": torch.float32, "vocab_size": 13, "num_hidden_layers": 1} | options
    return tiny_model(**{"architecture": "llama"} | chosen)


def key(model: Any) -> str:
    return fingerprint(TargetModel(model), [])[0]


@pytest.fixture(scope="module")
def plain() -> str:
    return key(llama())


def mlp(model: Any) -> Any:
    return model.model.layers[0].mlp


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) * self.factor


class AfterManyTokens(nn.SiLU):
    """A pass of a few tokens shows nothing of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if x.shape[1] > 500 else 1.0)


class Settings:
    def __init__(self, factor: float) -> None:
        self.factor = factor


class WithSettings(nn.SiLU):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.settings = Settings(factor)


def scaled_by(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: nn.functional.silu(x) * factor


LIMIT = 500


def limited(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(x) * (2.0 if x.shape[1] > LIMIT else 1.0)


def set_act(act: Any) -> Change:
    return lambda model: setattr(mlp(model), "act_fn", act)


def set_function(act: Any) -> Change:
    def change(model: Any) -> None:
        del mlp(model).act_fn  # a module, which assignment would not replace by a function
        mlp(model).act_fn = act

    return change


CHANGES: dict[str, Change] = {
    "another activation": set_act(nn.GELU()),
    "an activation with a factor": set_act(Scaled(1.5)),
    "an activation with another factor": set_act(Scaled(2.0)),
    "an activation that shows later": set_act(AfterManyTokens()),
    "a value within an object": set_act(WithSettings(1.0)),
    "another value within an object": set_act(WithSettings(2.0)),
    "a function": set_function(scaled_by(1.5)),
    "a function of the same code": set_function(scaled_by(2.0)),
    "a function that shows later": set_function(limited),
    "a partial function": set_function(functools.partial(nn.functional.leaky_relu, negative_slope=0.1)),
    "a partial function of another value": set_function(
        functools.partial(nn.functional.leaky_relu, negative_slope=0.2)
    ),
    "a number": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.25),
    "a number of the norm": lambda model: setattr(model.model.norm, "variance_epsilon", 0.1),
    "a module that does nothing": lambda model: setattr(model.model, "norm", nn.Identity()),
    "a tied module": lambda model: setattr(mlp(model), "up_proj", mlp(model).gate_proj),
    "a tied weight": lambda model: setattr(mlp(model).up_proj, "weight", mlp(model).gate_proj.weight),
    "a bias": lambda model: setattr(mlp(model).up_proj, "bias", nn.Parameter(torch.zeros(48))),
    "a weight that lies in another order": lambda model: setattr(
        mlp(model).up_proj, "weight", nn.Parameter(mlp(model).up_proj.weight.detach().T.contiguous().T)
    ),
    "a parametrization": lambda model: nn.utils.parametrizations.weight_norm(mlp(model).up_proj),
}


SHAPES: list[dict[str, Any]] = [
    {"vocab_size": 14},
    {"dtype": torch.float64},
    {"num_hidden_layers": 2},
    {"hidden_act": "gelu"},
    {"rms_norm_eps": 1e-3},
    {"tie_word_embeddings": True},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
    {"architecture": "mistral"},
]


def test_every_change_has_a_key_of_its_own(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"none": plain, "the weights": key(llama(seed=1))}
    for name, change in CHANGES.items():
        change(model := llama())
        keys[name] = key(model)
    keys |= {str(options): key(llama(**options)) for options in SHAPES}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    keys["threads"] = key(llama())
    monkeypatch.setattr("transformers.__version__", "99.0")
    keys["version"] = key(llama())
    assert keys.pop("the weights") == plain  # one program serves all weights
    assert len(set(keys.values())) == len(keys), keys


def test_functions_of_classes_and_of_their_module_count(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    forward, rotate = modeling_llama.LlamaMLP.forward, modeling_llama.rotate_half

    def later(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * (2.0 if x.shape[1] > 500 else 1.0)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", later)
    patched = key(llama())
    monkeypatch.undo()
    assert key(llama()) == plain != patched
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: -rotate(x))
    assert key(llama()) not in {plain, patched}


def test_a_global_that_a_function_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_limited() -> str:
        model = llama()
        CHANGES["a function that shows later"](model)
        return key(model)

    first = of_limited()
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 600)
    assert of_limited() != first


class Shift(nn.Module):
    """Adds a tensor that is neither a parameter nor a buffer, and so ends up in the program."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = [torch.full((1,), by)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by[0]


def test_tensors_that_are_no_parameters_count_with_their_content() -> None:
    keys = []
    for by in (1.0, 2.0, 1.0):
        model = llama()
        mlp(model).act_fn = Shift(by)
        keys.append(key(model))
    assert keys[0] == keys[2] != keys[1]


def nothing(*arguments: Any) -> None:
    """A hook that only looks."""


HOOKS: dict[str, Change] = {
    "a forward hook on model.layers.0.mlp": lambda model: mlp(model).register_forward_hook(nothing),
    "a forward hook on model.norm": lambda model: model.model.norm.register_forward_pre_hook(nothing),
    "a forward hook on the model": lambda model: model.register_forward_hook(nothing, always_call=True),
    "its forward replaced on model.layers.0.mlp": lambda model: setattr(mlp(model), "forward", lambda x: 2 * x),
    "its train replaced on the model": lambda model: setattr(model, "train", id),
}


@looped("what", HOOKS)
def test_what_runs_beside_the_forward_is_refused(what: str) -> None:
    target = TargetModel(llama())
    HOOKS[what](target.model)
    with pytest.raises(CompileError, match=f"LlamaForCausalLM has {what}, which "):
        fingerprint(target, [])


def test_hooks_of_all_modules_are_refused() -> None:
    target = TargetModel(llama())
    hook = nn.modules.module.register_module_forward_hook(nothing)
    try:
        with pytest.raises(CompileError, match="LlamaForCausalLM has a forward hook on every module"):
            fingerprint(target, [])
    finally:
        hook.remove()


def test_hooks_of_the_backward_pass_are_left_alone(plain: str) -> None:
    model = llama()
    mlp(model).register_full_backward_hook(nothing)
    assert key(model) == plain


@looped(
    "value",
    [threading.Lock(), iter([1]), weakref.ref(Scaled), [{"deep": threading.Lock()}]],
)
def test_what_a_later_run_could_not_recognise_is_refused(value: Any) -> None:
    target = TargetModel(llama())
    mlp(target.model).strange = value
    with pytest.raises(
        CompileError, match=r"LlamaForCausalLM has a \S+ in model\.layers\.0\.mlp\.strange, which a later"
    ):
        fingerprint(target, [])


def test_a_closure_over_what_has_no_words_is_refused() -> None:
    lock, target = threading.Lock(), TargetModel(llama())

    def act(x: torch.Tensor) -> torch.Tensor:
        with lock:
            return x

    set_function(act)(target.model)
    with pytest.raises(CompileError, match=r"a _thread.lock in model\.layers\.0\.mlp\.act_fn"):
        fingerprint(target, [])


IN_ANOTHER_PROCESS = """
import torch
from emssd.model.fingerprint import fingerprint
from emssd.model import TargetModel
from emssd.testing.models import ARCHITECTURES, tiny_model
torch.set_num_threads({threads})
for name in ARCHITECTURES:
    print("key", fingerprint(TargetModel(tiny_model(name, seed=1)), [])[0])
"""


@pytest.mark.costly("starts a process")
def test_another_process_finds_the_same_keys() -> None:
    process = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS.format(threads=torch.get_num_threads())],  # the key names them
        capture_output=True,
        text=True,
        check=True,
    )
    found = [line.split()[1] for line in process.stdout.splitlines() if line.startswith("key ")]
    assert found == [key(tiny_model(name)) for name in ARCHITECTURES]
