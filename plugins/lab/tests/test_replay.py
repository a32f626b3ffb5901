"""Replayed acceptance: as much is accepted as was stated or recorded, and verification is the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from emssd_lab.replay import ReplayConfig
from emssd_lab.replay.drafter import ReplayDrafter
from emssd_lab.simulate.trace_drafter import TreeLaw
from emssd_lab.simulate.traces import RequestTrace, StageTrace, Trace, save_trace
from emssd_testing.models import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd import Engine
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
    p=st.sampled_from([0.3, 0.8]),
    concentration=st.sampled_from([None, 5.0]),
    coverage=st.sampled_from([1.0, 0.5]),
    batch_size=st.integers(1, 5),
)
def test_what_is_accepted_is_what_the_trace_says(
    p: float, concentration: float | None, coverage: float, batch_size: int
) -> None:
    config = ReplayConfig(p=p, concentration=concentration, coverage=coverage, num_speculative_tokens=5)
    drafter = ReplayDrafter(config, 96)
    engine = Engine.from_model(MODEL, drafter=drafter, budget="fixed", batch_size=batch_size)
    for row in engine.generate(PROMPTS, 30):
        stage = drafter._stage(row.request_id)
        position = steps = accepted = 0
        while position < 30:
            right = min(stage.right[position], 30 - position - 1)
            position, steps, accepted = position + right + 1, steps + 1, accepted + right
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


@pytest.mark.parametrize("config", [ReplayConfig(), ReplayConfig(p=0.0, trace="trace")], ids=["drawn", "recorded"])
def test_a_model_whose_text_is_not_known_is_refused(config: ReplayConfig, tmp_path: Path) -> None:
    if config.trace:
        config.trace = str(a_trace(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot know what this model will generate; give drafter.known="):
        Engine.from_pretrained("demo", drafter=config)
    # Without a tokenizer it might be a counting model, until it goes on otherwise.
    engine = Engine.from_model(tiny_model(std=0.12), drafter=config, on_drafter_error="fail")
    with pytest.raises(PluginError, match="cannot know what this model will generate"):
        engine.generate(PROMPTS[:3], 40, ignore_eos=True)


def test_with_p_0_any_model_is_served_and_the_label_says_that_chance_remains() -> None:
    engine = Engine.from_pretrained("demo", drafter=ReplayConfig(p=0.0), budget="fixed", on_drafter_error="fail")
    engine.generate(PROMPTS, 8, ignore_eos=True)
    assert engine.report.num_drafted > 0
    (checked,) = engine.drafting.drafters
    assert checked.drafter.replays == "acceptance drawn: p = 0 (right by chance at most), 7 drafted"


def a_trace(folder: Path) -> Path:
    """Of two requests, the first with three tokens drafted and one right; then, two and one."""
    path = folder / "trace.jsonl"
    stages = [StageTrace((3, 0, 2, 0), (1, 0, 1, 0)), StageTrace((0, 0, 0, 0), (0, 0, 0, 0))]
    save_trace(Trace((3,), tuple(RequestTrace(str(i), 2, 8, (stage,)) for i, stage in enumerate(stages))), path)
    return path


def test_beside_known_outputs_a_trace_of_other_requests_is_refused(tmp_path: Path) -> None:
    known = tmp_path / "generations.jsonl"
    known.write_text("".join(f'{{"id": "{name}", "token_ids": [6, 7, 8, 9]}}\n' for name in ("0", "file.jsonl:1")))
    drafter = ReplayDrafter(ReplayConfig(known=str(known), trace=str(a_trace(tmp_path))), 96)
    assert drafter.replays == "acceptance recorded in trace.jsonl"
    rows = [Row(Request(name, (5,), 9)) for name in ("0", "file.jsonl:1")]
    assert drafter.propose(Batch((rows[0],)), [3]).token_ids.tolist()[:1] == [6]
    with pytest.raises(ConfigError, match=r"drafter.trace has no request 'file.jsonl:1', but 0, 1, …; .*data.id_field"):
        drafter.propose(Batch(tuple(rows)), [3, 3])


def test_a_recorded_trace_is_replayed_by_request_id(tmp_path: Path) -> None:
    drafter = ReplayDrafter(ReplayConfig(trace=str(a_trace(tmp_path))), 96)
    assert drafter.replays == "acceptance recorded in trace.jsonl, dealt out by request id"
    for i in range(9):  # a sample serves requests of any name, each always alike
        name = f"file.jsonl:{i}"
        assert drafter._stage(name) is drafter._stage(name)
    assert len({id(drafter._stage(f"file.jsonl:{i}")) for i in range(9)}) == 2
    (row,) = Engine.from_model(MODEL, drafter=drafter, budget="fixed").generate(PROMPTS[:1], 4)
    assert (row.num_steps, row.num_drafted, row.num_accepted) == (2, 4, 2)  # 3 drafted, 1 right; 1 of 2; the end


@looped(
    ("config", "message"),
    [
        (ReplayConfig(p=1.5), "p is 1.5"),
        (ReplayConfig(trace="nowhere.jsonl"), "trace nowhere.jsonl cannot be read"),
        (ReplayConfig(known="nowhere.jsonl"), "drafter.known=nowhere.jsonl cannot be read: No such file"),
        (ReplayConfig(branches=[2, 0]), r"branches are \[2, 0\]; give the number of children for each level"),
        (ReplayConfig(branches=[99, 99]), "at most 4096 nodes in all"),
        (ReplayConfig(branches=[2], chances=[[0.6, 0.6]]), "which add up to 1 at most"),
        (ReplayConfig(branches=[2], chances=[[-0.1]]), "give for each depth a list of one chance per rank"),
        (ReplayConfig(branches=[2], coverage=0.5), "leave out drafter.trace, drafter.concentration"),
    ],
)
def test_bad_options_are_refused(config: ReplayConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplayDrafter(config, 96)


def test_a_file_of_something_else_and_a_trace_of_two_drafters_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"token_ids": [1]}\n')
    with pytest.raises(ConfigError, match=r"is no generations.jsonl \(it has no id"):
        ReplayDrafter(ReplayConfig(known=str(path)), 96)
    stage = StageTrace((1,), (0,))
    save_trace(Trace((1, 1), (RequestTrace("0", 2, 8, (stage, stage)),)), path)
    with pytest.raises(ConfigError, match="is of 2 drafters in turn, and drafter=replay replays one"):
        ReplayDrafter(ReplayConfig(trace=str(path)), 96)


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
    assert drafter.replays == "acceptance drawn: trees of 2 × 2, right by depth and rank with [[0.0, 1.0]]"
    assert drafter.propose(Batch((row,)), [1]).lengths == [1]
    assert drafter.propose(Batch((Row(Request("a", (5,), 2)),)), [9]).token_ids.tolist() == [6, nodes[2][1]]


@given(st.integers(0, 99), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_of_each_nodes_children_at_most_one_is_right_and_as_often_as_stated(seed: int, branches: list[int]) -> None:
    law = TreeLaw(branches, [[0.5, 0.3], [0.4, 0.2, 0.1]], seed)
    assert list(law.worths) == sorted(law.worths, reverse=True)
    counts = [0] * len(law.parents)
    for position in range(1000):
        right = law.right("a", position)
        assert right == law.right("a", position)
        for parent in {-1, *law.parents}:
            children = [node for node, above in enumerate(law.parents) if above == parent]
            assert sum(right[node] for node in children) <= 1
        for node, is_right in enumerate(right):
            counts[node] += is_right
    for node, chance in enumerate(law.chances):
        if law.worths[node]:
            assert abs(counts[node] - 1000 * chance) < 5 * (1000 * chance * (1 - chance)) ** 0.5 + 1  # 5 sigma
