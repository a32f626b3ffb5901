"""`culprit`: the module whose numbers are the first to differ between a packed pass and the model's own passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from emssd.model.interface import implementation
from emssd.model.probe import PROBE_TOLERANCE, ProbeRows
from emssd.model.streams import only_here

__all__ = ["culprit"]

_Numbers = dict[tuple[str, str], tuple[str, list[Any]]]  # by module and moment: the module that runs, and tensors


@torch.inference_mode()
def culprit(target: Any) -> str | None:
    """The name of that module of a `HookedModel`; ``None`` where every module has the same numbers."""
    rows = ProbeRows(target)
    packed = _heard(target.model, lambda: rows.run_packed(target, rows.attend))
    with implementation("eager", experts_in_loops=target.dtype is torch.float64):
        alone = [_heard(target.model, lambda row=row: rows.run_one_alone(target, row)) for row in range(2)]
    for key, (module, tensors) in packed.items():
        others = [events[key][1] for events in alone if key in events]
        if len(others) == 2 and len({len(tensors), *map(len, others)}) == 1:
            if any(_differ(rows, target.dtype, *parts) for parts in zip(tensors, *others, strict=True)):
                return module
    return None


def _heard(model: torch.nn.Module, run: Callable[[], Any]) -> _Numbers:
    """The inputs and results of each module in its first call within `run`, in their order."""
    heard, running = _Numbers(), [""]

    def note(name: str, moment: str, values: Any) -> None:
        tensors = [value.clone() if isinstance(value, torch.Tensor) else None for value in tree_flatten(values)[0]]
        heard.setdefault((name, moment), (running[-1], tensors))

    def hooks_of(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(module: Any, args: Any, kwargs: Any) -> None:
            note(name, "in", (args, kwargs))
            running.append(name)

        def leave(module: Any, args: Any, output: Any) -> None:
            note(name, "out", output)
            running.pop()

        return only_here(enter), only_here(leave)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            enter, leave = hooks_of(name)
            hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(leave))
        run()
    return heard


def _differ(rows: ProbeRows, dtype: torch.dtype, packed: Any, *alone: Any) -> bool:
    """Whether a tensor of the packed pass has other numbers for a token than those of the rows alone."""
    if any(tensor is None for tensor in (packed, *alone)) or not packed.is_floating_point():
        return False
    lengths = [rows.num_tokens, *map(len, rows.rows)]
    sizes = zip(*(tensor.shape[:2] for tensor in (packed, *alone)), strict=False)  # beyond, tokens are keys of a mask
    dims = [dim for dim, size in enumerate(sizes) if list(size) == lengths]
    if len(dims) != 1 or len({tensor.ndim for tensor in (packed, *alone)}) != 1:
        return False
    theirs = torch.cat([tensor.movedim(dims[0], 0).flatten(1) for tensor in alone]).double()
    ours = packed.movedim(dims[0], 0).flatten(1)[rows.owner.argsort(stable=True).to(packed.device)].double()
    if ours.shape != theirs.shape:
        return False
    return not float((ours - theirs).abs().max() / theirs.std().clamp_min(1e-12)) <= PROBE_TOLERANCE[dtype]
