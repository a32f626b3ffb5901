"""Engines by turns give what they give alone, and go on side by side; the ratio of their speeds has an interval."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import groupby
from typing import Any

import pytest
from emssd_none import NoneDrafter
from emssd_testing.drafters import RandomDrafter

from emssd.cli.turns import Turns, ratio_interval
from emssd.decoding.engine import Engine
from emssd.sequences import Request
from tests.support.oracle import build
from tests.support.tiers import looped

EVEN = [(10, 1.0), (10, 2.0)]


def test_engines_by_turns_decode_as_alone_and_side_by_side(
    oracle: Any, make_ragged: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafters = [RandomDrafter(oracle.vocab_size, 3), NoneDrafter()]
    engines = [build(oracle, make_ragged, drafter, 2) for drafter in drafters]
    requests = [Request(str(i), prompt, 20) for i, prompt in enumerate([(4, 0, 3, 1, 2), (2,), (1, 3) * 10])]
    alone = {generation.request_id: generation.token_ids for generation in engines[1].run(requests)}
    order, step = list[Engine](), Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: [order.append(self), step(self)][1])
    turns = Turns(engines, requests)
    done: dict[Engine, dict[str, Any]] = {engine: {} for engine in engines}
    for engine, generation in turns.run():
        done[engine][generation.request_id] = generation.token_ids
    assert [*done.values()] == [alone, alone]
    assert len([*groupby(order)]) > len(turns.parts) > 20
    totals = [tuple(map(sum, zip(*parts, strict=True))) for parts in zip(*turns.parts, strict=True)]
    for engine, (tokens, seconds) in zip(engines, totals, strict=True):
        decode = engine.report.decode
        assert (tokens, seconds) == (decode.num_new_tokens, pytest.approx(decode.total_seconds))
    with closing(turns.run()) as run:
        next(run)
    assert not any(engine.has_work or engine.runner.usage.held for engine in engines)


@looped(
    "parts, interval",
    [
        ([EVEN] * 12, (2.0, 2.0)),
        ([EVEN] * 9, None),
        ([*[EVEN] * 9, [(0, 0.0), (10, 2.0)]], None),  # one of the two only read prompts
        ([EVEN, [(10, 30.0), (10, 60.0)]] * 6, (2.0, 2.0)),  # what slows both is no difference
        ([EVEN, [(10, 4.0), (10, 2.0)]] * 8, (0.5517, 1.0483)),
    ],
)
def test_the_interval_of_a_ratio(parts: Any, interval: tuple[float, float] | None) -> None:
    assert ratio_interval(parts) == (None if interval is None else pytest.approx(interval, abs=1e-3))
