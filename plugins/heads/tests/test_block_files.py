"""Files of block drafters: what is not stored twice, what is taken by default, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emssd.errors import ConfigError
from tests.support.block_heads import CONFIG, MARKOV, SIZE, VOCAB, load, shapes_of, target, written
from tests.support.heads import random_weights, refusal, write_head
from tests.support.tiers import looped


def test_copies_of_the_targets_tables_take_no_memory(tmp_path: Path) -> None:
    tables = {"embed_tokens.weight": target().model.get_input_embeddings(), "lm_head.weight": target().model.lm_head}
    copies = {name: table.weight.detach().clone() for name, table in tables.items()}
    head = load(write_head(tmp_path / "head", CONFIG, random_weights(shapes_of(CONFIG)) | copies))._head
    assert head.embed_tokens is head.lm_head is None


def test_layers_that_no_config_names_are_spread_over_the_target(tmp_path: Path) -> None:
    unnamed = {name: value for name, value in CONFIG.items() if name != "dflash_config"}
    weights = random_weights(shapes_of(CONFIG))
    one_layer = {name: weight for name, weight in weights.items() if not name.startswith("layers.1.")}
    one_layer["fc.weight"] = one_layer["fc.weight"][:, :SIZE].contiguous()
    path = write_head(tmp_path / "one", unnamed | {"num_hidden_layers": 1, "mask_token_id": 3}, one_layer)
    assert load(path).hidden_layers == (3,)  # after layer 4 // 2
    path = write_head(tmp_path / "two", unnamed | {"mask_token_id": 3, "block_size": 4}, weights)
    with pytest.raises(ConfigError, match="outputs of layers 1, 1, and needs different ones"):  # as there are but four
        load(path)


FIRST = {"markov_head.markov_w1.weight": (VOCAB, 3)}


def inner(**values: Any) -> dict[str, Any]:
    return {"dflash_config": CONFIG["dflash_config"] | values}


REFUSALS: list[tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = [
    ({"block_size": None}, {}, "its config.json has no block_size"),
    ({"dflash_config": {"target_layer_ids": [0, 2]}}, {}, "its config.json has no mask_token_id"),
    ({"dflash_config": [1]}, {}, "its dflash_config is no object of JSON"),
    ({"block_size": "many"}, {}, "a value of another type or size than expected"),
    (inner(mask_token_id=VOCAB), {}, f"the target has embeddings of {VOCAB} ids"),
    ({"vocab_size": 99}, {}, f"its vocabulary has 99 tokens, and the target's has {VOCAB}"),
    ({"hidden_size": 24}, {}, "it has a hidden size of 24, and the target's is 32; it was trained for another target"),
    ({"num_target_layers": 5}, {}, "trained for a target of 5 layers, and this one has 4"),
    (inner(target_layer_ids=[0, 4]), {}, "the target has layers 0 to 3"),
    ({"block_size": 10**9}, {}, "its block_size is 1000000000; a block drafts 1 to 4096 tokens"),
    ({"block_size": 1}, {}, "its block_size is 1; a block drafts 1 to 4096 tokens"),
    (inner(use_swa=True), {}, "no layer_types say which"),
    (
        {"speculators_model_type": "dflash", "transformer_layer_config": {"model_type": "mamba"}},
        {},
        "its layers are those of mamba",
    ),
    ({"speculators_model_type": "eagle3"}, {}, "what it holds is an EAGLE-3 head"),
    ({"num_hidden_layers": 3}, {}, "are missing"),
    ({}, {"candidate_selector.hidden_projection.weight": (2, 2)}, "candidate_selector.predecessor_codebook"),
    ({}, {"layers.0.mlp_conv.base_kernel": (2, 2, SIZE)}, "layers.0.mlp_conv.kernel_projection.weight is missing"),
    ({}, {"refiner_head.mix_l": (2, 5, 5)}, "refiner_head.token_embed.weight"),
    ({}, {"layers.0.extra.weight": (2, 2)}, "layers.0.extra.weight is without a place"),
    ({}, {"confidence_head.proj.weight": (1, SIZE + 3)}, "its confidence head reads a Markov head, and it has none"),
    (inner(markov_head_type="rnn"), MARKOV, "markov_head.joint_proj.weight is missing"),
    ({}, FIRST, "markov_head.markov_w2.weight is missing"),
    (inner(final_logit_softcapping=30.0), MARKOV, "it scales its logits by final_logit_softcapping 30.0, and"),
    (inner(output_multiplier=0.5), MARKOV, "it scales its logits by output_multiplier 0.5, and"),
    (inner(output_multiplier=-0.5), {}, "it scales its logits by output_multiplier -0.5, and"),
]


@looped("config, shapes, words", REFUSALS)
def test_wrong_files_are_refused_in_one_sentence(config: Any, shapes: Any, words: str, tmp_path: Path) -> None:
    path = write_head(tmp_path / "head", CONFIG | config, random_weights(shapes_of(CONFIG) | shapes))
    assert words in refusal(lambda: load(path))


def test_scaled_logits_have_the_same_likeliest_tokens_and_are_read_where_nothing_is_added(tmp_path: Path) -> None:
    config = CONFIG | inner(output_multiplier=0.5) | {"final_logit_softcapping": 30.0}
    load(write_head(tmp_path / "plain", config, random_weights(shapes_of(CONFIG))))
    neutral = CONFIG | inner(output_multiplier=1.0) | {"final_logit_softcapping": None}
    load(write_head(tmp_path / "markov", neutral, random_weights(shapes_of(CONFIG) | MARKOV)))


def test_more_tokens_than_a_block_drafts_are_refused(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path, "plain")
    words = "drafter.num_speculative_tokens is 5; a block of this head drafts 4 at most"
    assert words in refusal(lambda: load(path, num_speculative_tokens=5))
