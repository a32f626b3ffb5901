"""Finds the rules that a model states in its masks alone: a sliding window, or one that emssd does not serve."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from emssd.errors import UnsupportedModelError
from emssd.model.hf.hooked import HookedModel
from emssd.model.hf.interface import Visible
from emssd.model.hf.probe import look_at_layers, running

__all__ = ["learn_windows"]

_ALL_KEYS = 1 << 17


def learn_windows(target: HookedModel) -> dict[int, int]:
    """The sliding windows that go through a layer's mask alone, by layer.

    Transformers gives masks to the attention function as functions of positions. They are evaluated up to the longest
    sequence, which needs no run of that length.
    """
    name, windows, masks = type(target.model).__name__, dict[int, int](), dict[int, Visible]()
    layers = look_at_layers(target, masks)
    with running(target):
        by_mask = {mask: window_of(mask, target.max_model_len, name, target.device) for mask in {*masks.values()}}
    for layer, visible in masks.items():
        masked, window = by_mask[visible], layers[layer][0].sliding_window
        if window is None and masked is not None:
            windows[layer] = masked
        elif masked != window and not (masked is None and window is not None and window >= target.max_model_len):
            raise UnsupportedModelError(
                f"{name} gives layer {layer} a sliding window of {window}, and a mask "
                + (f"with a window of {masked}" if masked else "without one")
            )
    return windows


def window_of(visible: Visible, length: int, name: str, device: torch.device | str = "cpu") -> int | None:
    """The sliding window of a mask function in sequences of up to `length` tokens; ``None`` if it hides no earlier one.
    Raises UnsupportedModelError: it is no sliding window.
    """
    refusal = UnsupportedModelError(
        f"{name} has an attention mask that is neither causal nor a sliding window in sequences of {length} tokens, "
        f"and emssd serves no other"
    )
    visible = _of_text(visible)
    if not _of_positions(visible):
        raise refusal
    every = torch.arange(length, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)

    def seen(query: int, keys: torch.Tensor) -> torch.Tensor:
        return visible(zero, zero, torch.full_like(keys, query), keys).expand(len(keys))

    window = int(seen(length - 1, every).sum())
    queries = {*range(16), *range(window - 2, window + 3), length // 3, length // 2 + 1, length - 2, length - 1}
    for query in sorted(query for query in queries if 0 <= query < length):
        keys = every
        if length > _ALL_KEYS:  # then those near an edge, and some everywhere
            near = [range(edge - 64, edge + 64) for edge in (0, query - window, query, length)]
            sample = {*range(0, length, length // 4096)}.union(*near)
            keys = torch.tensor(sorted(key for key in sample if 0 <= key < length), device=device)
        if not torch.equal(seen(query, keys), (keys <= query) & (keys > query - window)):
            raise refusal
    return None if window >= length else window


def _of_text(visible: Visible) -> Visible:
    """A mask function without its part for blocks of images, where there are none."""
    from transformers.masking_utils import and_masks, or_masks

    parts = _captured(visible).get("mask_functions")
    for join in (and_masks, or_masks):
        if parts is not None and _is_made_by(visible, join):
            kept = [_of_text(part) for part in parts if join is and_masks or not _is_no_block(part)]
            return join(*kept) if len(kept) != 1 else kept[0]
    return visible


def _is_no_block(visible: Visible) -> bool:
    from transformers.masking_utils import blockwise_overlay

    return _is_made_by(visible, blockwise_overlay) and bool((_captured(visible)["block_sequence_ids"] < 0).all())


def _is_made_by(visible: Visible, maker: Callable[..., Any]) -> bool:
    name = getattr(visible, "__qualname__", "")
    return name.startswith(f"{maker.__qualname__}.<locals>") and visible.__module__ == maker.__module__


def _of_positions(visible: Any) -> bool:
    """Whether a function holds no tensor about this call's tokens, and so can be evaluated anywhere."""
    if isinstance(visible, torch.Tensor):
        return visible.numel() == 1  # of the one row
    if isinstance(visible, list | tuple):
        return all(map(_of_positions, visible))
    if isinstance(visible, FunctionType):
        return all(map(_of_positions, _captured(visible).values()))
    return visible is None or isinstance(visible, int | float | str)


def _captured(visible: Any) -> dict[str, Any]:
    """The variables that a function brings from where it was made, by name."""
    if not isinstance(visible, FunctionType):
        return {}
    cells = visible.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(visible.__code__.co_freevars, cells, strict=True)}
