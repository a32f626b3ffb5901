"""`differing_module`: the first module whose numbers differ between a packed pass and the model's own passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from emssd.model.hf.hooked import HookedModel
from emssd.model.hf.interface import implementation
from emssd.model.hf.streams import only_here

__all__ = ["differing_module"]

_Numbers = dict[tuple[str, str], tuple[str, list[Any]]]  # by module and moment: the module that runs, and tensors


@torch.inference_mode()
def differing_module(target: HookedModel, rows: Any, tolerance: float) -> str | None:
    """The name of that module; ``None`` where every module has the same numbers.

    Args:
        rows: the probe's, `emssd.model.hf.probe.ProbeRows`.
        tolerance: the standard deviations by which numbers may differ.
    """
    packed = _heard(target.model, partial(rows.run_packed, target, rows.attend))
    with implementation("eager", experts_in_loops=target.dtype is torch.float64):
        alone = [_heard(target.model, partial(rows.run_one_alone, target, row)) for row in range(2)]
    for key, (module, tensors) in packed.items():
        theirs = [events[key][1] for events in alone if key in events]
        alike = len(theirs) == 2 and len({len(tensors), *map(len, theirs)}) == 1
        if alike and any(_differ(rows, tolerance, *parts) for parts in zip(tensors, *theirs, strict=True)):
            return module
    return None


def _heard(model: torch.nn.Module, run: Callable[[], Any]) -> _Numbers:
    """The inputs and results of each module in its first call within `run`, in their order."""
    heard, running = _Numbers(), [""]

    def note(name: str, moment: str, values: Any) -> None:
        tensors = [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]
        numbers = [tensor.clone() for tensor in tensors if tensor.is_floating_point()]
        heard.setdefault((name, moment), (running[-1], numbers))

    def enter(name: str, module: Any, args: Any, kwargs: Any) -> None:
        note(name, "in", (args, kwargs))
        running.append(name)

    def leave(name: str, module: Any, args: Any, output: Any) -> None:
        note(name, "out", output)
        running.pop()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            before, after = only_here(partial(enter, name)), only_here(partial(leave, name))
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after))
        run()
    return heard


def _differ(rows: Any, tolerance: float, *tensors: torch.Tensor) -> bool:
    """Whether the packed pass, the first of `tensors`, has other numbers for a token than those of the rows alone."""
    sizes = zip(*(tensor.shape[:2] for tensor in tensors), strict=False)  # beyond, tokens are keys of a mask
    dims = [dim for dim, size in enumerate(sizes) if [*size] == [rows.num_tokens, *map(len, rows.rows)]]
    if len(dims) != 1:
        return False
    packed, *alone = (tensor.movedim(dims[0], 0).reshape(tensor.shape[dims[0]], -1).double() for tensor in tensors)
    ours = packed[rows.owner.argsort(stable=True).to(packed.device)]
    if len({part.shape[1] for part in (ours, *alone)}) != 1:
        return False
    theirs = torch.cat(alone)
    return not float((ours - theirs).abs().max() / theirs.std().clamp_min(1e-12)) <= tolerance
