"""The ``streamer`` that `generate` was given, and keeps from custom functions: somebody may wait for its end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any

import torch

__all__ = ["streamed"]


def streamed(decode: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The custom function `decode`, whose new tokens, once all are there, go to the streamer; it ends on errors too."""

    @wraps(decode)
    def run(model: Any, input_ids: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        streamer = _streamer()
        try:
            tokens = decode(model, input_ids, *arguments, **options)
            for column in tokens[:, input_ids.shape[1] :].cpu().T if streamer is not None else ():
                streamer.put(column)
            return tokens
        finally:
            if streamer is not None:
                streamer.end()

    return run


def _streamer() -> Any:
    """That of the innermost `generate` of Transformers: nothing else of the call leads to it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals["__name__"] == "transformers.generation.utils":
            return frame.f_locals.get("streamer")
        frame = frame.f_back
    return None
