"""Drafts are those of a model with the first layers alone, as far as it is sure.

Oracles: plain decoding and sampling by hand; models with fewer layers, run without a cache. float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from typing import Any

import emssd_early_exit
import pytest
import torch
from emssd_early_exit import EarlyExitConfig
from emssd_testing.models import tiny_model
from emssd_testing.oracle import greedy_reference

from emssd.drafting import DrafterContext
from emssd.errors import ConfigError
from emssd.model import TargetModel
from tests.support import right_drafters
from tests.support.right_drafters import loading, noting
from tests.support.right_drafts import Trial
from tests.support.tiers import looped


def trial(options: Mapping[str, Any] | None = None, **loaded: Any) -> Trial:
    """One with an engine of these options; with another `load`, perhaps, or another target."""
    made = replace(right_drafters.trial("early_exit"), **loaded)
    made.make_engine(options)
    return made


def test_a_chain_ends_behind_a_token_that_is_not_sure_enough() -> None:
    """Of the perfect drafter, whose confidence is the target's own, a lower bar gives longer drafts."""
    drafted = list[int]()
    unsure = loading(emssd_early_exit, EarlyExitConfig, lambda: {"num_layers": 3, "depth": 4}, sure=False)
    for least in (0.0, 0.5, 1.0):
        one = trial({"min_confidence": least}, load=unsure)
        one.decode()
        assert one.engine.report.num_accepted == one.engine.report.num_drafted
        drafted.append(one.engine.report.num_drafted)
    assert drafted[0] > drafted[1] > drafted[2]
    assert {*one.engine.report.acceptance_histogram} == {1, 2}, "one token at most is drafted where none is sure"


@cache
def model_of(architecture: str) -> TargetModel:
    return TargetModel(tiny_model(architecture, vocab_size=13, max_model_len=64))


def naive(model: Any, tokens: Seq[int], count: int, num_layers: int) -> list[int]:
    """Continue as the first layers do: the whole text again for each token, and no layer after them."""
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    hooks = [layer.register_forward_hook(lambda module, inputs, out: inputs[0]) for layer in layers[num_layers:]]
    text = greedy_reference(model, tokens, count)
    for hook in hooks:
        hook.remove()
    return text


@looped("architecture", ["llama", "qwen2", "gpt_neox", "opt", "gemma2"])
def test_it_drafts_what_the_first_layers_say_without_a_cache(architecture: str) -> None:
    """In every step of a run in which some of it is accepted and some is not."""
    model, drafts = model_of(architecture), list[tuple[list[int], list[int]]]()

    load = noting(right_drafters.trial("early_exit").load, drafts)
    engine = trial({"num_layers": 1, "depth": 3}, load=load, target=model).engine
    prompts = [(3, 4, 5, 6, 3, 4), (8,), (9, 10, 9, 10, 9, 10, 11)]
    engine.generate(prompts, 12, ignore_eos=True)
    for tokens, drafted in drafts:
        assert drafted == naive(model.model, tokens, len(drafted), 1)
    assert 0 < engine.report.num_accepted < engine.report.num_drafted


@looped(("num_layers", "quarter"), [(1, 1), (4, 1), (5, 2), (12, 3)])
def test_a_quarter_of_the_layers_is_the_default(num_layers: int, quarter: int) -> None:
    model = TargetModel(tiny_model("llama", num_hidden_layers=num_layers, hidden_size=8, intermediate_size=4))
    made: Any = trial({"num_layers": None}, target=model).engine.drafting.drafters[0].drafter
    assert made._runner.num_layers == quarter


@looped(("options", "words"), [({"num_layers": 4}, "drafter.num_layers is 4; choose 1 to 3, as the target has")])
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        trial(options)
    assert str(raised.value) == words


def test_without_a_model_there_are_no_layers() -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        pytest.fail("it asks for another model")

    context = DrafterContext(9, None, fails, fails)
    with pytest.raises(ConfigError, match=r"^the drafter runs layers of the target, and there is no model to take"):
        right_drafters.trial("early_exit").load({}, context)
