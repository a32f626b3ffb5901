"""An adapter drafts as far as it is sure and reaches, from files of its own kind.

Oracles: plain decoding and sampling by hand. float64. `test_always_right` tests that it is always right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import emssd_heads.kangaroo
import pytest
import torch
from emssd_heads.kangaroo import KangarooConfig

from tests.support import right_drafters
from tests.support.heads import Weights, new_folder, refusal, write_head
from tests.support.perfect_head import SIZE, VOCAB
from tests.support.right_drafters import loading, perfect_adapter
from tests.support.right_drafts import PROMPTS, Trial
from tests.support.tiers import looped


def written(config: dict[str, Any], weights: Weights, file: str = "pytorch_model.bin") -> str:
    return write_head(new_folder(), config, weights, file)


def trial(options: Mapping[str, Any] | None = None, **loaded: Any) -> Trial:
    """One with an engine of these options; with another `load`, perhaps, or another target."""
    case = replace(right_drafters.trial("kangaroo"), **loaded)
    case.make_engine(options)
    return case


def test_an_adapter_that_adds_nothing_is_right_behind_all_layers() -> None:
    config, weights = perfect_adapter()
    nothing = {"layers.0.self_attn.o_proj.weight": torch.zeros(SIZE, 30, dtype=torch.float64)}
    case = trial({"path": written(config, weights | nothing), "num_layers": 3})
    case.decode()
    assert case.is_full()


def test_a_chain_ends_behind_a_token_that_is_not_sure_enough() -> None:
    unsure = loading(emssd_heads.kangaroo, KangarooConfig, lambda: {"path": written(*perfect_adapter())}, sure=False)
    few, more = (trial({"min_confidence": least}, load=unsure) for least in (1.0, 0.5))
    few.decode()
    more.decode()
    assert {*few.engine.report.acceptance_histogram} == {1, 2}, "one token at most is drafted where none is sure"
    assert max(more.engine.report.acceptance_histogram) > 2
    assert more.engine.report.num_accepted == more.engine.report.num_drafted


def test_an_adapter_with_a_longest_row_drafts_no_further() -> None:
    config, weights = perfect_adapter()
    short = {"max_position_embeddings": 20, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    long = trial({"path": written(config | short, weights)}).decode()[3]
    assert len(PROMPTS[3]) == 17
    assert 0 < long.num_accepted <= 3


def test_the_memory_of_both_caches_is_told_and_given_back() -> None:
    case = trial()
    runner: Any = case.engine.drafting.drafters[0].drafter._runner
    case.decode()
    parts = runner._shallow.usage, runner._adapter.usage
    assert all(part.peak_held > 0 for part in parts)
    assert runner.usage.peak_held == sum(part.peak_held for part in parts)
    assert runner.usage.held == 0


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_names_of_a_whole_model_are_known(file: str) -> None:
    config, weights = perfect_adapter()
    named = {f"model.{name}": weight.clone() for name, weight in weights.items()}
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}
    case = trial({"path": written(config, named | computed, file)})
    case.decode()
    assert case.is_full()


def test_what_was_chosen_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "emssd"):
        trial()
    assert caplog.messages == [
        "drafter=kangaroo: Kangaroo adapter, read from model.safetensors",
        "drafter=kangaroo: rotary base 10000, the head's own",
        "drafter=kangaroo: reads the residual stream behind 2 layers, as drafter.num_layers says and no file does",
    ]


@looped(
    "change, words",
    [
        ({"layers.0.mlp.up_proj.weight": torch.ones(4, SIZE)}, "what it holds is a language model; what is wanted"),
        ({"layers.0.self_attn.q_proj.weight": None}, "of its weights, layers.0.self_attn.q_proj.weight is missing"),
        ({"layers.1.input_layernorm.weight": torch.ones(SIZE)}, "of its weights, layers.1.input_layernorm.weight is"),
        ({"norm.weight": torch.ones(SIZE + 1)}, f"of its weights, norm.weight ({SIZE + 1} in place of {SIZE}) is of"),
        ({"hidden_size": 32}, f"it has a hidden size of 32, and the target's is {SIZE}"),
        ({"vocab_size": 32000}, f"its vocabulary has 32000 tokens, and the target's has {VOCAB}"),
    ],
)
def test_files_of_something_else_are_refused(change: dict[str, Any], words: str) -> None:
    config, weights = perfect_adapter()
    if "." in next(iter(change)):
        weights = {name: weight for name, weight in (weights | change).items() if weight is not None}
    else:
        config = config | change
    assert f": {words}" in refusal(lambda: trial({"path": written(config, weights)}))
