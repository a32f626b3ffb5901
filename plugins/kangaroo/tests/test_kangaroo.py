"""An adapter drafts what its formulas say, as far as it is sure and reaches.

Oracles: plain decoding and sampling by hand; the adapter's formulas written anew, without a cache. float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import emssd_kangaroo
import pytest
import torch
from emssd_kangaroo import KangarooConfig

from emssd.errors import ConfigError
from emssd.model import TargetModel
from emssd.testing.models import tiny_model
from tests.support import right_drafters
from tests.support.heads import Weights, dense_layer, dense_rms, random_weights, write_head
from tests.support.perfect_head import SIZE, VOCAB
from tests.support.right_drafters import loading, noting, perfect_adapter
from tests.support.right_drafts import PROMPTS, Trial
from tests.support.tiers import looped


def written(config: dict[str, Any], weights: Weights, file: str = "pytorch_model.bin") -> str:
    return write_head(Path(mkdtemp(prefix="emssd-adapter-")), config, weights, file)


def trial(options: Mapping[str, Any] | None = None, **loaded: Any) -> Trial:
    """One with an engine of these options; with another `load`, perhaps, or another target."""
    own = replace(right_drafters.trial("kangaroo"), **loaded)
    own.make_engine(options)
    return own


def test_an_adapter_that_adds_nothing_is_right_behind_all_layers() -> None:
    config, weights = perfect_adapter()
    nothing = {"layers.0.self_attn.o_proj.weight": torch.zeros(SIZE, 30, dtype=torch.float64)}
    own = trial({"path": written(config, weights | nothing), "num_layers": 3})
    own.decode()
    assert own.is_full()


def test_a_chain_ends_behind_a_token_that_is_not_sure_enough() -> None:
    unsure = loading(emssd_kangaroo, KangarooConfig, lambda: {"path": written(*perfect_adapter())}, sure=False)
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
    own = trial()
    runner: Any = own.engine.drafting.drafters[0].drafter._runner
    own.decode()
    parts = runner._shallow.usage, runner._adapter.usage
    assert all(part.peak_held > 0 for part in parts)
    assert runner.usage.peak_held == sum(part.peak_held for part in parts)
    assert runner.usage.held == 0


CONFIG = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"head_dim": 8, "rms_norm_eps": 1e-5, "vocab_size": 13, "rope_theta": 500.0}
SHAPES = {
    "layers.0.input_layernorm.weight": (32,),
    "layers.0.self_attn.q_proj.weight": (32, 32),
    "layers.0.self_attn.k_proj.weight": (16, 32),
    "layers.0.self_attn.v_proj.weight": (16, 32),
    "layers.0.self_attn.o_proj.weight": (32, 32),
    "norm.weight": (32,),
}
NO_MLP = {f"layers.0.mlp.{name}_proj.weight": torch.zeros(1, 32) for name in ("gate", "up")}
NO_MLP |= {
    "layers.0.mlp.down_proj.weight": torch.zeros(32, 1),
    "layers.0.post_attention_layernorm.weight": torch.ones(32),
}


@torch.inference_mode()
def naive(model: Any, weights: Weights, tokens: Seq[int], count: int) -> list[int]:
    """Continue as the adapter does after the first layer: the whole text again for each token."""
    text, eps = list(tokens), CONFIG["rms_norm_eps"]
    for _ in range(count):
        stream = model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states[1][0]
        normed = dense_rms(stream, weights["layers.0.input_layernorm.weight"].double(), eps)
        out = dense_layer(weights | NO_MLP, "layers.0.", CONFIG, stream, normed, range(len(text)))
        last = dense_rms(out[-1:], weights["norm.weight"].double(), eps)
        text.append(int(model.get_output_embeddings()(last).argmax()))
    return text[len(tokens) :]


@looped("architecture", ["llama", "qwen2", "gpt_neox", "opt"])
def test_it_drafts_what_the_formulas_say_without_a_cache(architecture: str) -> None:
    """In every step of a run."""
    model = TargetModel(tiny_model(architecture, vocab_size=13, max_model_len=64))
    weights, drafts = random_weights(SHAPES), list[tuple[list[int], list[int]]]()

    load = noting(right_drafters.trial("kangaroo").load, drafts)
    options = {"path": written(CONFIG, weights), "num_layers": 1, "num_speculative_tokens": 3}
    engine = trial(options, load=load, target=model).engine
    engine.generate([(3, 4, 5, 6, 3, 4), (8,), (9, 10, 9, 10, 9, 10, 11)], 12, ignore_eos=True)
    for tokens, drafted in drafts:
        assert drafted == naive(model.model, weights, tokens, len(drafted))
    assert len({tuple(drafted) for _, drafted in drafts}) > 5
    assert engine.report.num_accepted < engine.report.num_drafted


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_names_of_a_whole_model_are_known(file: str) -> None:
    config, weights = perfect_adapter()
    named = {f"model.{name}": each.clone() for name, each in weights.items()}
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}
    own = trial({"path": written(config, named | computed, file)})
    own.decode()
    assert own.is_full()


def test_what_was_chosen_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "emssd"):
        trial()
    assert caplog.messages == [
        "drafter=kangaroo: Kangaroo adapter, read from model.safetensors",
        "drafter=kangaroo: rotary base 10000, the head's own",
        "drafter=kangaroo: reads the residual stream behind 2 layers, as drafter.num_layers says and no file does",
    ]


Change = Callable[[dict[str, Any], Weights], None]
FILES: dict[str, tuple[Change, str]] = {
    "an MLP": (
        lambda config, weights: weights.update({"layers.0.mlp.up_proj.weight": torch.ones(4, SIZE)}),
        "what it holds is a language model; what is wanted is a Kangaroo adapter",
    ),
    "an EAGLE head": (
        lambda config, weights: weights.update({"fc.weight": torch.ones(SIZE, 2 * SIZE)}),
        "what it holds is an EAGLE-1 or EAGLE-2 head; what is wanted is a Kangaroo adapter",
    ),
    "no queries": (
        lambda config, weights: weights.__delitem__("layers.0.self_attn.q_proj.weight"),
        "of its weights, layers.0.self_attn.q_proj.weight is missing",
    ),
    "a second layer": (
        lambda config, weights: weights.update({"layers.1.input_layernorm.weight": torch.ones(SIZE)}),
        "of its weights, layers.1.input_layernorm.weight is without a place in such a head",
    ),
    "another shape": (
        lambda config, weights: weights.update({"norm.weight": torch.ones(SIZE + 1)}),
        f"of its weights, norm.weight ({SIZE + 1} in place of {SIZE}) is of another shape than its config and",
    ),
    "another hidden size": (
        lambda config, weights: config.update({"hidden_size": 32}),
        f"it has a hidden size of 32, and the target's is {SIZE}",
    ),
    "another vocabulary": (
        lambda config, weights: config.update({"vocab_size": 32000}),
        f"its vocabulary has 32000 tokens, and the target's has {VOCAB}",
    ),
}


@looped("file", FILES)
def test_files_of_something_else_are_refused(file: str) -> None:
    config, weights = dict(perfect_adapter()[0]), dict(perfect_adapter()[1])
    change, words = FILES[file]
    change(config, weights)
    with pytest.raises(ConfigError) as raised:
        trial({"path": written(config, weights)})
    assert f": {words}" in str(raised.value)
