"""Engines that draft with EAGLE heads made by hand, and the texts that they must give, by hand as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import pytest
from emssd_eagle import EagleConfig
from emssd_eagle.drafter import load_drafter as load_eagle
from emssd_eagle3 import Eagle3Config
from emssd_eagle3.drafter import load_drafter as load_eagle3
from emssd_mtp import MtpConfig
from emssd_mtp.drafter import load_drafter as load_mtp

from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.drafters import PairedDrafter
from emssd.drafting import DrafterContext
from emssd.model import BorrowedTarget, TargetModel
from emssd.plugins.registry import Registry
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request
from emssd.testing.oracle import References
from tests.support import sampling as reference
from tests.support.perfect_head import (
    VOCAB,
    perfect_target,
    write_perfect_eagle,
    write_perfect_eagle3,
    write_perfect_mtp,
)

__all__ = ["DEPTH", "HEADS", "NUM_NEW", "PROMPTS", "Load", "decode", "is_full", "make_engine", "sure", "target", "text"]

MODEL_LEN, NUM_NEW, DEPTH = 144, 31, 4
PROMPTS = [[1, 3, 4, 6, 0, 7, 8, 3], [6], [7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 3, 1, 4, 4, 0, 6, 7]]

Load = Callable[[Any, DrafterContext], PairedDrafter]


class HeadKind(NamedTuple):
    """A plugin with heads that read pairs: its options, what builds its drafter, and what writes a perfect head."""

    config: type[Any]
    load: Load
    write: Callable[..., str]


HEADS = {
    "eagle": HeadKind(EagleConfig, load_eagle, write_perfect_eagle),
    "eagle3": HeadKind(Eagle3Config, load_eagle3, write_perfect_eagle3),
    "mtp": HeadKind(MtpConfig, load_mtp, write_perfect_mtp),
}


@cache
def target() -> TargetModel:
    return TargetModel(perfect_target(MODEL_LEN))


@cache
def references(num_new: int) -> References:
    return References(target(), num_new)


@cache
def head_path(head: str, **config: Any) -> str:
    """Where a perfect head of a kind is."""
    return HEADS[head].write(Path(mkdtemp(prefix="emssd-head-")), **config)


def sure(load: Load) -> Load:
    """Trees have the likeliest token of every level, whatever else; with siblings of it that are expanded, too."""

    def loaded(config: Any, context: DrafterContext) -> PairedDrafter:
        drafter = load(config, context)
        drafter.shape.temperature = 0.01
        return drafter

    return loaded


def make_engine(
    head: str,
    options: Mapping[str, Any],
    backend: Any = "ragged",
    *,
    adapted: Callable[[Load], Load] = lambda load: load,
    **engine: Any,
) -> Engine:
    """An engine whose drafter has a cache of its own, as large as the target's.

    Args:
        head: its kind.
        options: of the drafter.
        backend: by name.
        adapted: makes something else of what builds the drafter.
        engine: its options.
    """
    chosen = EngineOptions(on_drafter_error=OnDrafterError.fail, **({"batch_size": 4} | engine))
    limit = None if chosen.kv_memory is None else int(chosen.kv_memory) // target().kv_cache_spec(1).bytes_per_token()
    spec = replace(target().kv_cache_spec(chosen.batch_size), continuous=backend == "ragged", max_tokens=limit)
    context = DrafterContext(
        VOCAB,
        None,
        lambda path: pytest.fail("asks for no model"),
        lambda name, values: pytest.fail("asks for no other"),
        "fail",
        BorrowedTarget(target()),
        spec,
        lambda own: make_backend(own, backend, Registry()),
    )
    kind = HEADS[head]
    values = {"path": head_path(head), "depth": DEPTH} | dict(options)
    drafter = adapted(kind.load)(kind.config(**values), context)
    return Engine.assemble(target(), None, drafter=drafter, backend=backend, budget="fixed", options=chosen)


@cache
def text(name: str, prompt: tuple[int, ...], params: SamplingParams | None, num_new: int = NUM_NEW) -> tuple[int, ...]:
    """What the target says, computed without a cache."""
    if params is None:
        return references(num_new)[prompt][:num_new]
    return reference.sampled(target().model, prompt, num_new, params, name)


def decode(engine: Engine, kinds: Seq[SamplingParams | None] = (None,) * 4) -> list[Generation]:
    """In order; every token is that of decoding by hand."""
    pairs = enumerate(zip(PROMPTS, kinds, strict=True))
    requests = [Request(str(row), tuple(ids), NUM_NEW, sampling=kind) for row, (ids, kind) in pairs]
    done = {generation.request_id: generation for generation in engine.run(requests)}
    for request in requests:
        expected = text(request.request_id, request.prompt_ids, request.sampling)
        assert done[request.request_id].token_ids == expected
    return [done[request.request_id] for request in requests]


def is_full(engine: Engine, depth: int = DEPTH) -> bool:
    """Whether every draft was accepted down to its deepest node.

    A row gives one token in its first step, which has no draft, and then `depth` + 1 in each, as far as it goes.
    """
    left = (NUM_NEW - 1) % (depth + 1)
    wanted = {1: 4, depth + 1: 4 * ((NUM_NEW - 1) // (depth + 1))}
    if left:
        wanted[left] = wanted.get(left, 0) + 4
    return engine.report.acceptance_histogram == wanted
