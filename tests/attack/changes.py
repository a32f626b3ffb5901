"""Ways in which a model changes between two runs of an engine that lives on."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch


def _drawn(rng: random.Random, like: torch.Tensor) -> torch.Tensor:
    """Other weights: all of them, or one row, turned around or drawn anew."""
    values = like.detach().clone()
    rows: Any = slice(None) if rng.random() < 0.7 else rng.randrange(len(values))
    with torch.random.fork_rng():
        torch.manual_seed(rng.getrandbits(32))
        other = torch.randn_like(values) * values.std().nan_to_num(0.3)
    values[rows] = -values[rows] if rng.random() < 0.3 else other[rows]
    return values


def _some(model: Any, rng: random.Random) -> list[torch.nn.Parameter]:
    """One of the weights, a few, or all."""
    weights = list(model.parameters())
    return rng.sample(weights, rng.choice((1, min(3, len(weights)), len(weights))))


def _written(write: Callable[[torch.nn.Parameter, torch.Tensor], object]) -> Callable[[Any, random.Random], None]:
    """Some of the weights get other values, by `write`."""

    @torch.no_grad()
    def change(model: Any, rng: random.Random) -> None:
        for weight in _some(model, rng):
            write(weight, _drawn(rng, weight))

    return change


def _loaded(model: Any, rng: random.Random) -> None:
    model.load_state_dict({name: _drawn(rng, value) for name, value in model.state_dict().items()})


def _trained(model: Any, rng: random.Random) -> None:
    """A step of the optimizer that trainers take by default; it raises no version of a tensor."""
    weights = _some(model, rng)
    for weight in weights:
        weight.grad = _drawn(rng, weight)
    torch.optim.AdamW(weights, lr=0.3, fused=True).step()
    for weight in weights:
        weight.grad = None


def _replaced(model: Any, rng: random.Random) -> None:
    """Another module in the place of a linear layer; its weights are others."""
    name, old = rng.choice([pair for pair in model.named_modules() if type(pair[1]) is torch.nn.Linear])
    new = torch.nn.Linear(old.in_features, old.out_features, old.bias is not None, dtype=old.weight.dtype)
    new.load_state_dict({key: _drawn(rng, value) for key, value in old.state_dict().items()})
    model.set_submodule(name, new.requires_grad_(old.weight.requires_grad))


def _hooked(model: Any, rng: random.Random) -> None:
    """As adapters do it: the weights stay, and a layer gives something else."""
    layers = [layer for layer in model.modules() if type(layer) is torch.nn.Linear]
    factor = rng.choice((-1.0, 0.3, 2.0))
    rng.choice(layers).register_forward_hook(lambda module, inputs, output: output * factor)


CHANGES: dict[str, Callable[[Any, random.Random], None]] = {
    "copy_": _written(lambda weight, values: weight.copy_(values)),
    ".data written": _written(lambda weight, values: weight.data.copy_(values)),
    ".data replaced": _written(lambda weight, values: setattr(weight, "data", values)),
    "numpy": _written(lambda weight, values: weight.detach().numpy().__setitem__(..., values.numpy())),
    "load_state_dict": _loaded,
    "fused optimizer": _trained,
    "replaced module": _replaced,
    "hook": _hooked,
}
