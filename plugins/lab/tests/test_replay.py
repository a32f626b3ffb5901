"""Replayed acceptance: as much is accepted as was stated, and verification is the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from emssd_lab.replay import ReplayConfig
from emssd_lab.replay.drafter import ReplayDrafter
from emssd_testing.models import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd import Engine
from emssd.drafting.budget import FixedBudget
from emssd.errors import ConfigError, PluginError
from emssd.model.load.loading import counted_on, counting_model
from emssd.sequences import Batch, Request, Row
from tests.support.tiers import looped

OPT = {
    "model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "vocab_size": 96, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 256,
}  # fmt: skip
PROMPTS = [[5, 6, 7], [9], [4, 4, 4, 4], [90, 11], [30]]


@pytest.mark.parametrize("architecture", [OPT, LLAMA])
@looped("dtype", [torch.float32, torch.bfloat16])
def test_a_counting_model_counts_on_in_every_precision_and_batch(architecture: dict, dtype: torch.dtype) -> None:
    model = counting_model(architecture, dtype, torch.device("cpu"))
    engine = Engine.from_model(model, drafter="none", batch_size=3)
    for prompt, row in zip(PROMPTS, engine.generate(PROMPTS, 100), strict=True):
        assert list(row.token_ids) == counted_on(prompt[-1], 100, 96)


@settings(max_examples=settings.default.max_examples // 4)
@given(
    config=st.builds(
        ReplayConfig,
        p=st.sampled_from([0.3, 0.8]),
        concentration=st.sampled_from([None, 5.0]),
        coverage=st.sampled_from([1.0, 0.5]),
        num_speculative_tokens=st.just(5),
        branches=st.lists(st.integers(1, 2), max_size=3),
    ),
    batch_size=st.integers(1, 5),
    num_tokens=st.integers(0, 9),
)
def test_what_is_accepted_is_what_the_coins_say(config: ReplayConfig, batch_size: int, num_tokens: int) -> None:
    drafter = ReplayDrafter(config, 96)
    engine = Engine.from_model(MODEL, drafter=drafter, budget=FixedBudget(num_tokens), batch_size=batch_size)
    for row in engine.generate(PROMPTS, 30):
        position = steps = accepted = 0
        while position < 30:
            right, node, depth = drafter.right(row.request_id, position), -1, 0
            for number, (level, rank, parent) in enumerate(drafter.nodes[: num_tokens if right else 0]):
                if parent == node and level < 30 - position and right[level - 1] == rank:
                    node, depth = number, level
            position, steps, accepted = position + depth + 1, steps + 1, accepted + depth
        assert (row.num_steps, row.num_accepted) == (steps, accepted)  # the same at every batch size


MODEL = counting_model(OPT, torch.float32, torch.device("cpu"))


def test_a_real_model_is_replayed_from_its_own_output(tmp_path: Path) -> None:
    model = tiny_model(std=0.12)
    greedy = Engine.from_model(model, drafter="none", batch_size=2).generate(PROMPTS[:3], 40)
    known = tmp_path / "generations.jsonl"
    known.write_text(
        "".join(json.dumps({"id": row.request_id, "token_ids": list(row.token_ids)}) + "\n" for row in greedy)
    )
    config = ReplayConfig(p=1.0, num_speculative_tokens=4, known=str(known))
    engine = Engine.from_model(model, drafter=config, budget="fixed", batch_size=2)
    rows = engine.generate(PROMPTS[:3], 40)
    assert [row.token_ids for row in rows] == [row.token_ids for row in greedy]
    assert engine.report.num_accepted == engine.report.num_drafted > 0
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "x", "token_ids": [1]}\n')
    engine = Engine.from_model(model, drafter=ReplayConfig(known=str(other)), on_drafter_error="fail")
    with pytest.raises(PluginError, match=r"drafter.known has no row '0'"):
        engine.generate(PROMPTS[:1], 8)


@looped("config", [ReplayConfig(), ReplayConfig(p=0.0, branches=[2], chances=[[0.0, 0.1]])])
def test_a_model_whose_text_is_not_known_is_refused(config: ReplayConfig) -> None:
    with pytest.raises(ConfigError, match=r"cannot know what this model will generate; give drafter.known="):
        Engine.from_pretrained("demo", drafter=config)
    # Without a tokenizer it might be a counting model, until it goes on otherwise.
    engine = Engine.from_model(tiny_model(std=0.12), drafter=config, budget="fixed", on_drafter_error="fail")
    with pytest.raises(PluginError, match="cannot know what this model will generate"):
        engine.generate(PROMPTS[:3], 40, ignore_eos=True)


def test_with_p_0_any_model_is_served_and_the_label_says_that_chance_remains() -> None:
    engine = Engine.from_pretrained("demo", drafter=ReplayConfig(p=0.0), budget="fixed", on_drafter_error="fail")
    engine.generate(PROMPTS, 8, ignore_eos=True)
    assert engine.report.num_drafted > 0
    (checked,) = engine.drafting.drafters
    assert checked.drafter.replays == "acceptance drawn: p = 0 (right by chance at most), 7 drafted"


@looped(
    ("config", "message"),
    [
        (ReplayConfig(known="nowhere.jsonl"), "drafter.known=nowhere.jsonl cannot be read: No such file"),
        (ReplayConfig(known=__file__), "is no generations.jsonl"),
        (ReplayConfig(branches=[99, 99]), "at most 4096 nodes in all"),
        (ReplayConfig(num_speculative_tokens=9999), "at most 4096 nodes in all"),
        (ReplayConfig(chances=[[0.6, 0.6]]), "which add up to 1 at most"),
        (ReplayConfig(p=1.0, concentration=1.0), "give a p between 0 and 1 without drafter.chances"),
        (ReplayConfig(chances=[[0.5]], concentration=1.0), "or leave out drafter.concentration"),
    ],
)
def test_bad_options_are_refused(config: ReplayConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplayDrafter(config, 96)


def test_a_tree_takes_the_right_child_and_the_output_is_that_of_the_model() -> None:
    config = ReplayConfig(branches=[2, 2], chances=[[0.0, 1.0]])
    drafter = ReplayDrafter(config, 96)
    row = Row(Request("a", (5,), 60))
    draft = drafter.propose(Batch((row,)), [9])
    assert drafter.num_speculative_tokens == draft.lengths[0] == 6
    assert draft.token_ids.tolist()[:2] == [6, 7], "nodes are sorted by how likely they are"
    nodes = list(zip(draft.tree(0), draft.token_ids.tolist(), strict=True))
    assert len(set(nodes)) == 6, "siblings differ"
    assert draft.cut([2]).is_chain
    assert drafter.replays == "acceptance drawn: [[0.0, 1.0]] by depth and rank, trees of 2 × 2"
    assert drafter.propose(Batch((row,)), [1]).lengths == [1]
    assert drafter.propose(Batch((Row(Request("a", (5,), 2)),)), [9]).token_ids.tolist() == [6, nodes[2][1]]


@pytest.mark.parametrize(
    ("options", "chances"),
    [
        ({"p": 0.7}, [[0.7]]),
        ({"p": 0.7, "concentration": 3.0, "coverage": 0.5}, [[0.7]]),
        ({"branches": [3, 2, 3], "chances": [[0.5, 0.3], [0.4, 0.2, 0.1]]}, [[0.5, 0.3, 0.0], [0.4, 0.2, 0.1]]),
    ],
)
def test_drafts_are_right_as_often_as_stated(options: dict, chances: list[list[float]]) -> None:
    drafter = ReplayDrafter(ReplayConfig(**options), 96)
    drawn = [drafter.right(str(request), 7 * request) for request in range(2000)]
    assert drawn[:9] == [drafter.right(str(request), 7 * request) for request in range(9)]
    right = [ranks for ranks in drawn if ranks]
    for count, total, share in [(len(right), 2000, options.get("coverage", 1.0))] + [
        (sum(ranks[depth] == rank for ranks in right), len(right), chance)
        for depth in range(3)
        for rank, chance in enumerate(chances[min(depth, len(chances) - 1)])
    ]:
        assert abs(count - total * share) <= 5 * (total * share * (1 - share)) ** 0.5  # 5 sigma
    drafter.release(map(str, range(2000)))
    assert not drafter._drawn
