"""Files of another head are refused; the hidden states that a head reads are chosen by rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from emssd_heads.eagle3.layers import LayerIds, aux_layers
from emssd_heads.eagle3.loading import load_eagle3
from emssd_heads.target import TargetSizes

from emssd.errors import ConfigError
from tests.support.heads import SMALL, Weights, changed, eagle3_shapes, random_weights, refusal, write_head
from tests.support.perfect_head import write_perfect_eagle3
from tests.support.right_drafters import DEPTH, decode, trial
from tests.support.tiers import looped

H, V, VD = 16, 40, 12
TARGET = TargetSizes(V, H, 9)
CONFIG: dict[str, Any] = SMALL | {"vocab_size": V, "draft_vocab_size": VD}


def head_weights() -> Weights:
    d2t = torch.arange(VD)  # draft id i is the target's 2 i
    t2d = (torch.arange(V) % 2 == 0) & (torch.arange(V) < 2 * VD)
    return random_weights(eagle3_shapes(CONFIG, 3)) | {"d2t": d2t, "t2d": t2d}


def load(path: str, target: TargetSizes = TARGET) -> Any:
    return load_eagle3(path, replace(target, dtype=torch.float64))


def test_the_head_that_the_others_are_made_of_is_taken(tmp_path: Path) -> None:
    rotary = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(2)}  # older versions stored it
    head = load(write_head(tmp_path, CONFIG, head_weights() | rotary)).head
    assert head.to_target(torch.tensor([0, 5])).tolist() == [0, 10]
    assert not any(parameter.requires_grad for parameter in head.parameters())


@looped(
    "config, change, words",
    [
        ({}, {"norm.weight": None}, "of its weights, norm.weight is missing"),
        ({}, {"midlayer.mlp.up_proj.weight": None}, "layers.0.mlp.up_proj.weight is missing"),
        ({}, {"extra": torch.ones(2)}, "extra is without a place in such a head"),
        ({}, {"norm.weight": torch.ones(3), "fc.weight": torch.ones(5, 48)}, "(5x48 in place of 16x48), norm.weight"),
        ({}, {"layers.0.hidden_norm.weight": torch.ones(H)}, "are for the same place"),
        ({}, {"fc.weight": torch.ones(H, 50)}, "its fc reads 50 numbers, which is no multiple of the target's hidden"),
        ({}, {"fc.weight": None}, "fc.weight is missing"),
        ({"vocab_size": 41}, {}, "its vocabulary has 41 tokens, and the target's has 40"),
        ({"draft_vocab_size": 13}, {}, "lm_head.weight (12x16 in place of 13x16)"),
        ({"target_hidden_size": 32}, {}, "it was trained for a hidden size of 32, and the target's is 16"),
        ({}, {"d2t": None}, "no d2t says which"),
        ({}, {"d2t": torch.arange(VD - 1)}, "its d2t has 11 entries, and it drafts 12 tokens"),
        ({}, {"d2t": torch.arange(VD) * 3}, "its d2t gives no 12 different tokens of the target's 40"),
        ({}, {"d2t": torch.zeros(VD, dtype=torch.int64)}, "its d2t and t2d name different tokens"),
        ({"num_aux_hidden_states": 4}, {}, "num_aux_hidden_states 4, and its fc reads 3"),
        ({"norm_before_fc": True, "fc_norm": True}, {}, "sets both norm_before_fc and fc_norm"),
        ({"fc_norm": True}, {}, "fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight are missing"),
        ({"kv_lora_rank": 512}, {}, "of the kind MLA"),
        ({"rope_scaling": {"type": "longrope"}}, {}, "rotary embeddings are of type longrope"),
        ({"rope_scaling": {"type": "linear"}}, {}, "rotary embeddings of type linear have no factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5}}}, {}, "its layers have different rotary embeddi"),
        ({"partial_rotary_factor": 0.5}, {}, "it rotates a part of each head only"),
        ({"hidden_act": "wavy"}, {}, "its hidden_act is 'wavy'"),
        ({"num_attention_heads": "many"}, {}, "a value of another type or size than expected"),
        ({"hidden_size": None}, {}, "its config.json has no hidden_size"),
        ({"num_hidden_layers": 10**9}, {}, "num_hidden_layers is 1000000000, and no whole number from 1 to 1024"),
        ({"head_dim": 10**9}, {}, "head_dim is 1000000000, and no whole number from 1 to 1048576"),
        ({"num_key_value_heads": [2]}, {}, "num_key_value_heads is [2], and no whole number from 1 to 1048576"),
        ({"hidden_act": ["silu"]}, {}, "its config.json has a value of another type or size than expected"),
        ({"architectures": 5}, {}, "another type or size than expected ('int' object is not iterable); repair that"),
        ({"eagle_config": "x"}, {}, "its config.json has a value of another type or size than expected"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, {}, "reads 3 hidden states of the target, and its config na"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 10]}, {}, "hidden states 2, 4, 10, and a target of 9 layers"),
        ({"speculators_model_type": "medusa"}, {}, "what is wanted is an EAGLE-3 head or a P-EAGLE head"),
        ({"speculators_model_type": "peagle"}, {}, "it drafts in parallel, and its mask_token_id is None"),
        ({"mask_token_id": V}, {"mask_hidden": torch.ones(1, 1, 3 * H)}, "its mask_token_id is 40; that must be"),
        ({"mask_token_id": 3}, {"mask_hidden": torch.ones(1, 1, H)}, "mask_hidden (1x1x16 in place of 1x1x48)"),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "mamba"}},
            {},
            "its layers are those of mamba",
        ),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": "wide"}},
            {},
            "Transformers does not take its transformer_layer_config",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(config: Any, change: Any, words: str, tmp_path: Path) -> None:
    assert words in refusal(lambda: load(write_head(tmp_path, CONFIG | config, changed(head_weights(), change))))


def test_a_head_without_what_it_would_borrow_must_be_as_wide_as_its_target(tmp_path: Path) -> None:
    weights = head_weights() | {"fc.weight": torch.ones(H, 60)}
    path = write_head(tmp_path, CONFIG, weights)
    with pytest.raises(ConfigError, match="would use the target's embed_tokens, of size 20"):
        load(path, TargetSizes(V, 20, 9))


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
def test_the_user_says_which_hidden_states_a_head_reads(layer_ids: str) -> None:
    path = write_perfect_eagle3(Path(mkdtemp(prefix="emssd-head-")), **WRONG)
    engine = trial("eagle3").make_engine(CHAIN | {"path": path, "layer_ids": layer_ids})
    decode(engine)
    report = engine.report
    assert (report.num_accepted == report.num_drafted, report.num_steps < 12) == ((layer_ids == "output",) * 2)
