"""The key of a compiled program: every change of what a model computes gives another key, or none.

A key that stays would run another model's program: wrong tokens, without a word. A key that differs from process to
process would compile, and round, at random.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emssd_testing.models import tiny_model
from torch import nn
from transformers import PreTrainedModel

from emssd.errors import CompileError
from emssd.model.compile.fingerprint import UnnamedError, fingerprint, refuse_hooks
from emssd.model.hf.streams import only_here
from tests.support.tiers import looped

Change = Callable[[Any], object]


def llama(**options: Any) -> PreTrainedModel:
    chosen: dict[str, Any] = {"dtype": torch.float32, "vocab_size": 13, "num_hidden_layers": 1} | options
    return tiny_model(**{"architecture": "llama"} | chosen)


def key(model: Any) -> str:
    return fingerprint(model, [])


@pytest.fixture(scope="module")
def plain() -> str:
    return key(llama())


def mlp(model: Any) -> Any:
    return model.model.layers[0].mlp


class Scaled(nn.SiLU):
    """A pass of a few tokens shows nothing of it."""

    factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (self.factor if x.shape[1] > 500 else 1.0)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return Scaled().forward(x)


def set_act(act: Any) -> Change:
    def change(model: Any) -> None:
        del mlp(model).act_fn  # a module, which assignment would not replace by a function
        mlp(model).act_fn = act

    return change


def attention(model: Any) -> Any:
    return model.model.layers[0].self_attn


CHANGES: dict[str, Change] = {
    "another activation": set_act(nn.GELU()),
    "a value within an activation": set_act(nn.LeakyReLU(0.1)),
    "another value within an activation": set_act(nn.LeakyReLU(0.2)),
    "a function": set_act(nn.functional.silu),
    "a partial function": set_act(functools.partial(nn.functional.leaky_relu, negative_slope=0.1)),
    "a partial function of another value": set_act(functools.partial(nn.functional.leaky_relu, negative_slope=0.2)),
    "a number": lambda model: setattr(attention(model), "scaling", 0.25),
    "a number of the norm": lambda model: setattr(model.model.norm, "variance_epsilon", 0.1),
    "a config that a pass reads": lambda model: setattr(model.config, "pretraining_tp", 2),
    "a module that does nothing": lambda model: setattr(model.model, "norm", nn.Identity()),
    "a tied module": lambda model: setattr(mlp(model), "up_proj", mlp(model).gate_proj),
    "a tied weight": lambda model: setattr(mlp(model).up_proj, "weight", mlp(model).gate_proj.weight),
    "a bias": lambda model: setattr(mlp(model).up_proj, "bias", nn.Parameter(torch.zeros(48))),
    "a weight that lies in another order": lambda model: setattr(
        mlp(model).up_proj, "weight", nn.Parameter(mlp(model).up_proj.weight.detach().T.contiguous().T)
    ),
    "a parametrization": lambda model: nn.utils.parametrizations.weight_norm(mlp(model).up_proj),
    "training": lambda model: attention(model).train(),
}
"""Changes that a later process could recognise."""

UNNAMED: dict[str, Change] = {
    "test_fingerprint.Scaled is no library's in model.layers.0.mlp.act_fn.its class": set_act(Scaled()),
    "test_fingerprint.scaled is no library's in model.layers.0.mlp.act_fn": set_act(scaled),
    "a builtins.function is no library's in model.layers.0.mlp.act_fn": set_act(only_here(scaled, scaled)),
    "a builtins.method is no library's in model.layers.0.mlp.act_fn": set_act(nn.SiLU().forward),
    "a torch.Tensor is no library's in model.layers.0.mlp.act_fn.by": (
        lambda model: setattr(mlp(model).act_fn, "by", [torch.ones(1)])
    ),
}
"""By the reason, changes that it could not."""


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


@looped("reason", UNNAMED)
def test_what_a_later_process_could_not_recognise_has_no_key(reason: str) -> None:
    UNNAMED[reason](model := llama())
    with pytest.raises(UnnamedError, match=re.escape(reason)):
        key(model)


def test_functions_of_classes_count(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    for owner in (type(mlp(model)), nn.Linear):
        forward = owner.forward
        for patch in (scaled, functools.wraps(forward)(lambda *given: given), torch.no_grad()(scaled)):
            monkeypatch.setattr(owner, "forward", patch)
            with pytest.raises(UnnamedError, match="is no library's"):
                key(model)
        monkeypatch.setattr(owner, "forward", nn.SiLU.forward)
        assert key(model) != plain
        monkeypatch.undo()
    assert key(model) == plain


@looped("architecture", ["gemma3_text", "olmo3"])
def test_no_order_in_which_a_model_was_made_counts(architecture: str) -> None:
    """Transformers registers buffers and fills dictionaries in the order of a set, which differs between processes."""
    model, other = (tiny_model(architecture, layer_types=["sliding_attention", "full_attention"]) for _ in range(2))
    for module in [*other.modules()]:
        for table in (vars(module), *(value for value in vars(module).values() if type(value) is dict)):
            for name in reversed([*table]):
                table[name] = table.pop(name)
    assert [*dict(model.named_buffers())] != [*dict(other.named_buffers())]
    assert key(model) == key(other)


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
    HOOKS[what](model := llama())
    with pytest.raises(CompileError, match=f"LlamaForCausalLM has {what}, which "):
        refuse_hooks(model)


def test_hooks_of_all_modules_are_refused() -> None:
    hook = nn.modules.module.register_module_forward_hook(nothing)
    try:
        with pytest.raises(CompileError, match="LlamaForCausalLM has a forward hook on every module"):
            refuse_hooks(llama())
    finally:
        hook.remove()


def test_what_transformers_keeps_in_a_class_is_no_part_of_the_key(plain: str) -> None:
    model = llama()
    model.set_attn_implementation("eager")
    assert vars(type(model))["_can_set_attn_implementation_cached_value"]
    assert key(llama()) == plain


def test_hooks_of_the_backward_pass_are_left_alone(plain: str) -> None:
    model = llama()
    mlp(model).register_full_backward_hook(nothing)
    refuse_hooks(model)
    assert key(model) == plain


def tagging(made: Callable[..., None]) -> Callable[..., None]:
    def patched(self: nn.Module, *given: Any, **options: Any) -> None:
        made(self, *given, **options)

    return patched


def test_torch_compile_elsewhere_in_the_process_changes_no_key(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `torch._dynamo.mutation_guard` does."""
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, tagging(getattr(nn.Module, name)))
    assert key(llama()) == plain
