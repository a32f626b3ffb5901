"""Helpers to compare with the library `speculators`: float64 arithmetic, random weights, engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.drafting import Drafter, DrafterContext
from emssd.model import BorrowedTarget, TargetModel
from emssd.plugins.registry import Registry

__all__ = ["PROMPTS", "all_double", "decode", "randomize"]

PROMPTS = [(1, 3, 4, 6, 0, 7, 8, 3, 9, 11), (5,), (7, 8, 7, 8, 7, 8, 2)]


@contextmanager
def all_double() -> Iterator[None]:
    """Code that computes norms and angles in float32, whatever the dtype, computes them in float64."""
    with pytest.MonkeyPatch.context() as wide:
        wide.setattr(torch, "float32", torch.float64)
        wide.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Random parameters, large enough that each matters; vectors, those of norms, lie around 1."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + (weight.ndim == 1))


def decode(target: TargetModel, load: Callable[[DrafterContext], Drafter], num_new: int) -> list[tuple[int, ...]]:
    """The texts after `PROMPTS`, which three rows decode together, in order and with their prompts."""
    context = DrafterContext(
        target.vocab_size,
        None,
        lambda path: pytest.fail("asks for no model"),
        lambda name, values: pytest.fail("asks for no other"),
        "fail",
        BorrowedTarget(target),
        target.kv_cache_spec(len(PROMPTS)),
        lambda own: make_backend(own, "ragged", Registry()),
    )
    options = EngineOptions(batch_size=len(PROMPTS), max_step_tokens=16, on_drafter_error=OnDrafterError.fail)
    engine = Engine.assemble(target, None, drafter=load(context), backend="ragged", budget="fixed", options=options)
    texts: Seq[Any] = engine.generate(PROMPTS, num_new, ignore_eos=True)
    return [(*prompt, *text.token_ids) for prompt, text in zip(PROMPTS, texts, strict=True)]
