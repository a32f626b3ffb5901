"""Layers that keep a state: Transformers' five functions for them, each as a convolution or one recurrence.

Since 5.16, linear attention, state spaces and short convolutions of all models mix tokens in functions of these names,
which a modelling module looks up in each call. `install` puts a switch before each. Within `states_by`, a `StatePass`
that knows the rows computes them; at any other time, and in other threads, they are the model's own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F  # PyTorch's own name for it

from emssd.errors import UnsupportedModelError
from emssd.model.hf.recurrent_pass import Recurrence, StatePass

__all__ = ["install", "keeps_states", "states_by"]


_PASS: ContextVar[StatePass | None] = ContextVar("_PASS", default=None)


@contextmanager
def states_by(ops: StatePass) -> Iterator[None]:
    """Within, `ops` mixes the tokens of models that this thread calls."""
    token = _PASS.set(ops)
    try:
        yield
    finally:
        _PASS.reset(token)


def keeps_states(model_class: type) -> bool:
    """Whether the module that defines `model_class` calls one of the functions."""
    return not _FUNCTIONS.keys().isdisjoint(vars(sys.modules[model_class.__module__]))


def install(model: torch.nn.Module) -> bool:
    """Put a switch before each function that the code of `model` calls. Returns whether there is any."""
    has_any = False
    for code in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name in _FUNCTIONS.keys() & vars(code).keys():
            has_any = True
            if not hasattr(getattr(code, name), "emssd_switch"):
                setattr(code, name, _switch(getattr(code, name), _FUNCTIONS[name]))
    return has_any


def _switch(original: Callable[..., Any], rule: Callable[[StatePass, Mapping[str, Any]], Any]) -> Callable[..., Any]:
    signature = inspect.signature(getattr(original, "__wrapped__", original))  # PyTorch's; kernels have the same names

    @wraps(original)
    def switch(*args: Any, **kwargs: Any) -> Any:
        if (ops := _PASS.get()) is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return rule(ops, bound.arguments)

    switch.emssd_switch = True  # type: ignore[attr-defined]
    return switch


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """States are wide whatever the model's dtype, as in Transformers' own code."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _refuse_state(of: Mapping[str, Any], name: str) -> None:
    if of.get(name) is not None:
        raise UnsupportedModelError(f"a layer keeps its state beside its cache: it passes {name}")


def _convolution(ops: StatePass, of: Mapping[str, Any]) -> torch.Tensor:
    from transformers.activations import ACT2FN

    values, weight = of["hidden_states"], of["weight"]  # [b, channels, n]
    out = ops.convolve(values.transpose(1, 2).flatten(0, 1).to(weight.dtype), weight, of["bias"])
    out = out if of["activation"] is None else ACT2FN[of["activation"]](out)
    return out.view(values.shape[0], values.shape[2], -1).transpose(1, 2).to(values.dtype)


def _delta_rule(ops: StatePass, of: Mapping[str, Any]) -> tuple[torch.Tensor, None]:
    """The gated delta rule, and Kimi's, whose decay differs along the keys."""
    _refuse_state(of, "initial_state")
    value = of["value"]  # [b, n, heads, v]
    query, key, decay = (_wide(of[name].flatten(0, 1)) for name in ("query", "key", "g"))
    if of["use_qk_l2norm_in_kernel"]:
        query, key = (vector * torch.rsqrt((vector * vector).sum(-1, keepdim=True) + 1e-6) for vector in (query, key))
    groups = value.shape[2] // query.shape[1]
    query, key = (vector.repeat_interleave(groups, 1) for vector in (query * query.shape[-1] ** -0.5, key))
    decay = decay[..., None] if decay.ndim == 3 else decay[..., None, None]
    out = ops.recur(Recurrence(query, key, _wide(value.flatten(0, 1)), decay, _wide(of["beta"].flatten(0, 1))))
    return out.view(value.shape).to(of["query"].dtype), None


def _mamba2(ops: StatePass, of: Mapping[str, Any]) -> Any:
    _refuse_state(of, "initial_states")
    inputs = of["hidden_states"]  # [b, n, heads, v]
    dt = of["dt"] if of["dt_bias"] is None else of["dt"] + of["dt_bias"].to(of["dt"].dtype)
    dt = _wide((F.softplus(dt) if of["dt_softplus"] else dt).clamp(*of["dt_limit"]).flatten(0, 1))
    values = _wide(inputs.flatten(0, 1))
    groups = inputs.shape[2] // of["B"].shape[2]
    key, query = (_wide(of[name].flatten(0, 1)).repeat_interleave(groups, 1) for name in ("B", "C"))
    decay = (of["A"].to(dt.dtype) * dt)[..., None, None]
    out = ops.recur(Recurrence(query, key, values * dt[..., None], decay))
    if of["D"] is not None:
        out = out + of["D"][..., None] * values
    out = out.view(inputs.shape)
    return (out, None) if of["return_final_states"] else out


def _mamba(ops: StatePass, of: Mapping[str, Any]) -> Any:
    inputs = of["hidden_states"]  # [b, v, n]
    dt = of["dt"] if of["delta_bias"] is None else of["dt"] + of["delta_bias"].to(of["dt"].dtype)[..., None]
    dt = F.softplus(dt) if of["delta_softplus"] else dt
    parts = (part.transpose(1, 2).flatten(0, 1).unsqueeze(1) for part in (inputs, dt, of["B"], of["C"]))
    value, dt, key, query = map(_wide, parts)
    rates = of["A"].to(dt.dtype).transpose(0, 1)
    out = ops.recur(Recurrence(query, key, value * dt, dt.unsqueeze(2), rates=rates)).to(inputs.dtype)
    out = out.view(inputs.shape[0], inputs.shape[2], -1).transpose(1, 2)
    out = out if of["D"] is None else out + inputs * of["D"][None, :, None]
    out = out if of["z"] is None else out * F.silu(of["z"])
    return (out, None) if of["return_last_state"] else out


_FUNCTIONS: dict[str, Callable[[StatePass, Mapping[str, Any]], Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
}
