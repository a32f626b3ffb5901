"""The hidden states that a head reads are measured if its file leaves them open. No token depends on it. float64."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.support.perfect_head import random_head, write_perfect_eagle3
from tests.support.right_drafters import DEPTH, decode, trial

CHAIN = {"tree": "chain", "depth": DEPTH}
# The perfect head reads the streams 1, 2 and 3: outputs of the layers 0, 1 and 2.
WRONG = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}  # at the top, the guess is that they are streams
RIGHT = {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": WRONG}  # and here, that they are outputs


def perfect(config: dict[str, Any]) -> dict[str, Any]:
    """Options of a drafter with a perfect head of this config."""
    return CHAIN | {"path": write_perfect_eagle3(Path(mkdtemp(prefix="emssd-head-")), **config)}


@pytest.mark.parametrize("backend", ["ragged", "padded"])
@pytest.mark.parametrize(("config", "layers"), [(WRONG, "with the latter"), (RIGHT, "with the former")])
def test_a_wrong_guess_is_noticed(
    config: dict[str, Any], layers: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="emssd")
    engine = trial("eagle3").make_engine(perfect(config), backend)
    decode(engine)
    assert engine.report.num_accepted == engine.report.num_drafted > 0
    (line,) = (each for each in caplog.messages if "foresees" in each)
    assert layers in line
    assert "(drafter.layer_ids=output)" in line


@pytest.mark.parametrize("layer_ids", ["hs", "output"])
def test_what_the_user_says_is_not_measured(layer_ids: str) -> None:
    engine = trial("eagle3").make_engine(perfect(WRONG) | {"layer_ids": layer_ids})
    decode(engine)
    report = engine.report
    assert (report.num_accepted == report.num_drafted, report.num_steps < 12) == ((layer_ids == "output",) * 2)


def test_the_guess_is_kept_where_nothing_is_foreseen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="emssd")
    decode(trial("eagle3").make_engine(CHAIN | {"path": random_head("eagle3").path}))
    assert "(drafter.layer_ids=" in caplog.text
