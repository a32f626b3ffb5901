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

from emssd.decoding.engine import Engine
from emssd.drafters import PairedDrafter
from emssd.drafting import DrafterContext
from emssd.model import TargetModel
from emssd.sampling import SamplingParams
from emssd.sequences import Generation
from tests.support.fed_heads import NUM_NEW, Trial
from tests.support.perfect_head import (
    perfect_target,
    write_perfect_eagle,
    write_perfect_eagle3,
    write_perfect_mtp,
)

__all__ = [
    "DEPTH",
    "HEADS",
    "NUM_NEW",
    "PROMPTS",
    "Load",
    "decode",
    "decode_failing",
    "is_full",
    "make_engine",
    "sure",
    "target",
    "text",
]

MODEL_LEN, DEPTH = 144, 4
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
    kind = HEADS[head]

    def load(values: Mapping[str, Any], context: DrafterContext) -> PairedDrafter:
        config = kind.config(**{"path": head_path(head), "depth": DEPTH} | dict(values))
        return adapted(kind.load)(config, context)

    return replace(_trial(), load=load).make_engine(options, backend, **engine)


def text(name: str, prompt: tuple[int, ...], params: SamplingParams | None, num_new: int = NUM_NEW) -> tuple[int, ...]:
    """What the target says, computed without a cache."""
    return _trial().text(name, prompt, params, num_new)


def decode(engine: Engine, kinds: Seq[SamplingParams | None] = (None,) * 4) -> list[Generation]:
    """See `Trial.decode`."""
    return replace(_trial(), engine=engine).decode(kinds)


def decode_failing(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """See `Trial.failing_steps`."""
    replace(_trial(), engine=engine).failing_steps(patch)


def is_full(engine: Engine, depth: int = DEPTH) -> bool:
    """See `Trial.is_full`."""
    return replace(_trial(), engine=engine, depth=depth).is_full()


@cache
def _trial() -> Trial:
    return Trial(target(), DEPTH, lambda values, context: pytest.fail("there is no head"), PROMPTS)
