"""The hidden states that a head reads are chosen by rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from emssd_heads.eagle3.variant import LayerIds, aux_layers

from emssd.errors import ConfigError
from tests.support.perfect_head import write_perfect_eagle3
from tests.support.right_drafters import DEPTH, decode, trial
from tests.support.tiers import looped


@looped(
    ("ids", "options", "layers", "other"),
    [
        (None, {}, (2, 18, 33), None),
        ((1, 17, 33), {}, (2, 18, 34), None),
        ((24, 30, 36), {"nested": True}, (24, 30, 36), None),
        ((1, 17, 33), {"container": True}, (1, 17, 33), None),
        ((3, 17, 33), {}, (3, 17, 33), "output"),
        ((3, 17, 33), {"nested": True}, (4, 18, 34), "hs"),
        ((3, 17, 33), {"meaning": LayerIds.output}, (4, 18, 34), None),
        ((1, 17, 33), {"meaning": LayerIds.hs}, (1, 17, 33), None),
    ],
)
def test_layers_are_chosen_by_rule_and_a_guess_names_the_other_one(
    ids: Any, options: Any, layers: Any, other: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    assert aux_layers(ids, 3, 36, **options)[0] == layers
    assert [message.endswith(f"set {other}") for message in caplog.messages] == [True] * (other is not None)


def test_without_ids_the_target_must_have_the_default_layers() -> None:
    with pytest.raises(ConfigError, match=r"and its config names 3 by default"):
        aux_layers(None, 4, 36)
    with pytest.raises(ConfigError, match=r"hidden states 2, 1, -1"):
        aux_layers(None, 3, 2)
    with pytest.raises(ConfigError, match=r"hidden states 2, 2, 1, and needs different ones"):
        aux_layers(None, 3, 4)


CHAIN = {"tree": "chain", "depth": DEPTH}
# The perfect head reads the streams 1, 2 and 3: outputs of the layers 0, 1 and 2. The guess is that they are streams.
WRONG = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}


@pytest.mark.parametrize("layer_ids", ["hs", "output"])
def test_the_user_says_which_hidden_states_a_head_reads(layer_ids: str, tmp_path: Path) -> None:
    path = write_perfect_eagle3(tmp_path, **WRONG)
    engine = trial("eagle3").make_engine(CHAIN | {"path": path, "layer_ids": layer_ids})
    decode(engine)
    report = engine.report
    assert (report.num_accepted == report.num_drafted, report.num_steps < 12) == ((layer_ids == "output",) * 2)
