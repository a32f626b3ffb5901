"""Heads that their target always agrees with are always accepted, and with any fault in what they are fed they are not.

Oracles: plain decoding and sampling by hand, without a cache; each draft computed anew from formulas, dense, node by
node. float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import emssd_hydra.drafter
import pytest
import torch
from emssd_hydra import HydraConfig
from emssd_hydra.drafter import HydraDrafter
from emssd_hydra.heads import HydraHeads
from hypothesis import given, settings
from hypothesis import strategies as st

from emssd.attention import PackedInputs
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.decoding.packing import pack_nodes
from emssd.drafters.heads.options import TreeKind
from emssd.drafters.heads.trees import read_trees
from emssd.drafters.states import KnownStates
from emssd.drafting import Draft
from emssd.errors import ConfigError
from emssd.model import TargetModel
from emssd.sequences import Batch, Request
from tests.support.ending import EndsByTurns
from tests.support.fed_heads import KINDS, NUM_NEW, PROMPTS, Trial, earlier_states, states_of_other_nodes
from tests.support.heads import Weights, dense_layer, dense_rms, layer_weights, random_weights, write_head
from tests.support.hidden import right_states
from tests.support.perfect_head import SIZE, VOCAB, perfect_target
from tests.support.perfect_hydra import NUM_HEADS, PREFIX, write_perfect_hydra
from tests.support.tiers import looped

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain"},
    "static": {"tree": "static"},
    "dynamic": {"tree": "dynamic", "num_nodes": 14, "top_k": 3},
}
ARCHES = ["mlp", "prefix-mlp"]


@cache
def heads_path(arch: str = "prefix-mlp") -> str:
    return write_perfect_hydra(Path(mkdtemp(prefix="emssd-heads-")), prefix=arch == "prefix-mlp")


@cache
def trial() -> Trial:
    def load(options: Mapping[str, Any], context: Any) -> HydraDrafter:
        drafter = HydraDrafter.load(HydraConfig(**({"path": heads_path()} | dict(options))), context)
        drafter.shape.temperature = 0.01  # its trees have the likeliest token of every level, whatever else
        return drafter

    return Trial(TargetModel(perfect_target(144)), NUM_HEADS, load)


@looped("kinds", KINDS)
@looped("shape", SHAPES)
def test_heads_that_are_always_right_are_always_accepted(shape: str, kinds: str) -> None:
    trial().make_engine(SHAPES[shape])
    trial().decode(KINDS[kinds])
    assert trial().is_full()


@looped(("arch", "backend"), [("mlp", "ragged"), ("mlp", "padded"), ("prefix-mlp", "padded")])
@looped("shape", ["chain", "dynamic"])
def test_each_architecture_on_each_backend(shape: str, arch: str, backend: str) -> None:
    trial().make_engine(SHAPES[shape] | {"path": heads_path(arch)}, backend)
    trial().decode(KINDS["mixed"])
    assert trial().is_full()


@looped("arch", ARCHES)
@looped("max_step_tokens", [5, 24])
def test_prompts_in_pieces(max_step_tokens: int, arch: str) -> None:
    options = SHAPES["chain"] | {"path": heads_path(arch)}
    trial().make_engine(options, max_step_tokens=max_step_tokens, batch_size=2)
    for generation in trial().decode():
        assert generation.num_accepted == generation.num_drafted > NUM_NEW // 2


@pytest.mark.parametrize("arch", ARCHES)
def test_rows_that_are_preempted_begin_anew(arch: str) -> None:
    trial().decode_preempted(SHAPES["chain"] | {"path": heads_path(arch)})


@pytest.mark.parametrize("arch", ARCHES)
def test_a_step_that_failed_is_drafted_for_again(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial().make_engine(SHAPES["dynamic"] | {"path": heads_path(arch)})
    trial().failing_steps(monkeypatch)
    assert trial().is_full()


def test_a_budget_policy_ends_drafts_between_levels() -> None:
    policy = EndsByTurns()
    trial().make_engine(SHAPES["dynamic"]).drafting.policy = policy
    trial().decode(KINDS["mixed"])
    policy.check()


def other_paths(patch: pytest.MonkeyPatch) -> None:
    """Each node has the way of another node of its level."""
    forward = HydraHeads.forward
    patch.setattr(HydraHeads, "forward", lambda self, hidden, embeds: forward(self, hidden, embeds.roll(1, 0)))


def paths_turned_around(patch: pytest.MonkeyPatch) -> None:
    forward = HydraHeads.forward
    patch.setattr(HydraHeads, "forward", lambda self, hidden, embeds: forward(self, hidden, embeds.flip(1)))


def embeddings_of_the_state(patch: pytest.MonkeyPatch) -> None:
    """The token that the hidden state is of in the place of the newest one."""
    begin = HydraDrafter._begin

    def before(self: Any, batch: Any, budget: Any) -> Any:
        return [replace(row, tokens=row.tokens[:-1]) for row in begin(self, batch, budget)]

    patch.setattr(HydraDrafter, "_begin", before)


def states_of_other_rows(patch: pytest.MonkeyPatch) -> None:
    read = HydraDrafter._read
    patch.setattr(HydraDrafter, "_read", lambda self, rows: read(self, rows).roll(1, 0))


def positions_of_new_states(patch: pytest.MonkeyPatch) -> None:
    """That of the newest state is one too high, as if it was for the newest token."""

    def shifted(*given: Any) -> PackedInputs:
        packed = pack_nodes(*given)
        positions = packed.position_ids.clone()
        positions[torch.tensor(packed.qo_indptr[1:]) - 1] += 1
        return replace(packed, position_ids=positions)

    patch.setattr(emssd_hydra.drafter, "pack_nodes", shifted)


def kv_of_the_state_before(patch: pytest.MonkeyPatch) -> None:
    """The last state of each delivery is left out of the cache."""
    new = KnownStates.new

    def without(self: KnownStates, num_tokens: int) -> torch.Tensor:
        found = new(self, num_tokens).clone()
        found[:-1] = found[1:].clone()
        return found

    patch.setattr(KnownStates, "new", without)


def states_before_the_norm(patch: pytest.MonkeyPatch) -> None:
    load = HydraDrafter.load.__func__  # type: ignore[attr-defined]

    def other(cls: Any, config: Any, context: Any) -> HydraDrafter:
        drafter: HydraDrafter = load(cls, config, context)
        drafter.hidden_layers = (2,)
        return drafter

    patch.setattr(HydraDrafter, "load", classmethod(other))


FAULTS = {
    "other paths": other_paths,
    "paths turned around": paths_turned_around,
    "embeddings of the state": embeddings_of_the_state,
    "earlier states": earlier_states(HydraDrafter),
    "states of rejected nodes": states_of_other_nodes,
    "states of other rows": states_of_other_rows,
    "another layer": states_before_the_norm,
}
PREFIX_FAULTS = {
    "newest states one position too deep": positions_of_new_states,
    "KV of other states": kv_of_the_state_before,
}


@pytest.mark.parametrize(
    ("arch", "fault"),
    [*((arch, fault) for arch in ARCHES for fault in FAULTS), *(("prefix-mlp", each) for each in PREFIX_FAULTS)],
)
def test_heads_that_are_fed_wrongly_are_accepted_less_and_no_token_changes(
    arch: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (FAULTS | PREFIX_FAULTS)[fault](monkeypatch)
    engine = trial().make_engine(SHAPES["dynamic"] | {"path": heads_path(arch)})
    trial().decode()
    assert not trial().is_full()
    assert engine.report.num_drafted > 0


CONFIG: dict[str, Any] = {
    "hidden_size": SIZE,
    "intermediate_size": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "rms_norm_eps": 1e-12,
}


@cache
def random_heads(arch: str, seed: int = 0) -> tuple[str, Weights]:
    """Three heads that know nothing."""
    dropout, shapes = int(arch == "prefix-mlp"), dict[str, tuple[int, ...]]()
    for head in range(3):
        for part in ("linear", "res_connection"):
            place = f"hydra_mlp.{head}.{dropout}.{part}"
            shapes |= {f"{place}.weight": (SIZE, (head + 2) * SIZE), f"{place}.bias": (SIZE,)}
        behind = f"hydra_lm_head.{head}{'.1' if dropout else ''}"
        shapes |= {f"{behind}.weight": (VOCAB, SIZE), f"{behind}.bias": (VOCAB,)}
    if dropout:
        shapes |= {
            f"{PREFIX}layers.0.input_layernorm.weight": (SIZE,),
            f"{PREFIX}norm.weight": (SIZE,),
            **layer_weights(f"{PREFIX}layers.0.", CONFIG, SIZE),
        }
    weights = random_weights(shapes, seed)
    folder = Path(mkdtemp(prefix="emssd-heads-"))
    return write_head(folder, {"hydra_head_arch": arch}, weights, "hydra_lm_head.pt"), weights


class Naive:
    """One row's draft, computed anew: the whole text, and each node by itself.

    Args:
        arch: of the heads.
        tokens: of the row, the newest one last.
    """

    def __init__(self, arch: str, tokens: list[int]) -> None:
        self.w = {name: each.double() for name, each in random_heads(arch)[1].items()}
        self.dropout, self.newest = int(arch == "prefix-mlp"), tokens[-1]
        self.embeddings = trial().target.model.get_input_embeddings().weight.detach()
        (states,) = right_states(trial().target.model, tokens[:-1], [-1])
        if self.dropout:
            layer, eps = f"{PREFIX}layers.0.", CONFIG["rms_norm_eps"]
            normed = dense_rms(states, self.w[f"{layer}input_layernorm.weight"], eps)
            out = dense_layer(self.w, layer, CONFIG, states, normed, range(len(states)))
            states = dense_rms(out, self.w[f"{PREFIX}norm.weight"], eps)
        self.hidden = states[-1]

    def children(self, path: Seq[int]) -> list[tuple[float, int]]:
        """What may follow `path`, the most probable first, with its logarithm."""
        head = len(path)
        place, behind = f"hydra_mlp.{head}.{self.dropout}", f"hydra_lm_head.{head}{'.1' if self.dropout else ''}"
        x = torch.cat([self.hidden, *(self.embeddings[token] for token in (self.newest, *path))])
        y = self.w[f"{place}.linear.weight"] @ x + self.w[f"{place}.linear.bias"]
        x = self.w[f"{place}.res_connection.weight"] @ x + self.w[f"{place}.res_connection.bias"]
        logits = self.w[f"{behind}.weight"] @ (x + y * torch.sigmoid(y)) + self.w[f"{behind}.bias"]
        logs = torch.log_softmax(logits, 0).tolist()
        return sorted(((log, token) for token, log in enumerate(logs)), reverse=True)

    def dynamic(self, num_nodes: int, depth: int, top_k: int) -> dict[tuple[int, ...], float]:
        """The best nodes of EAGLE-2's tree, the best first, with the logarithms of their products."""
        found, level = dict[tuple[int, ...], float](), [()]
        for _ in range(depth):
            grown = {
                (*path, token): found.get(path, 0.0) + log
                for path in level
                for log, token in self.children(path)[:top_k]
            }
            found |= grown
            level = sorted(grown, key=lambda path: -grown[path])[:top_k]
        return {path: found[path] for path in sorted(found, key=lambda path: -found[path])[:num_nodes]}

    def static(self, num_nodes: int, depth: int) -> dict[tuple[int, ...], float]:
        """The best nodes of the published tree."""
        tree = read_trees("emssd_hydra")["mc_sim_7b_63"]
        found, paths = {(): 0.0}, [None] * len(tree.parents)
        for node, (parent, rank, deep) in enumerate(zip(tree.parents, tree.ranks, tree.depths, strict=True)):
            path = paths[parent] if parent >= 0 else ()
            if deep <= depth and rank < VOCAB and path is not None:
                log, token = self.children(path)[rank]
                paths[node] = (*path, token)
                found[paths[node]] = found[path] + log
        del found[()]
        return {path: found[path] for path in sorted(found, key=lambda path: -found[path])[:num_nodes]}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_are_those_of_the_formulas(shape: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trial().make_engine(SHAPES[shape] | {"path": random_heads(arch)[0]}, batch_size=3)
    propose, num_compared = HydraDrafter.propose, 0

    def compared(self: HydraDrafter, batch: Batch, budget: Seq[int]) -> Draft:
        nonlocal num_compared
        self.shape.temperature = 1.0
        budget = [min(limit, (70, 2, 9)[num_compared % 3]) for limit in budget]
        draft = propose(self, batch, budget)
        for at, (row, limit) in enumerate(zip(batch, budget, strict=True)):
            paths, start = list[tuple[int, ...]](), draft.indptr[at]
            for token, parent in zip(draft.token_ids[start:].tolist(), draft.tree(at), strict=False):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            if paths:
                num_compared += 1
                naive, depth = Naive(arch, list(row.tokens)), min(3, row.num_remaining - 1)
                number, top_k = (min(limit, 3), 1) if shape == "chain" else (min(limit, 14), 3)
                expected = naive.static(limit, depth) if shape == "static" else naive.dynamic(number, depth, top_k)
                assert paths == list(expected)
                assert draft.confidence is not None
                logs = [expected[path] - expected.get(path[:-1], 0.0) for path in paths]
                sure = torch.tensor(draft.confidence[start : start + len(paths)]).log().tolist()
                assert sure == pytest.approx(logs, abs=1e-5)
        return draft

    monkeypatch.setattr(HydraDrafter, "propose", compared)
    engine.generate(PROMPTS, 12, ignore_eos=True)
    assert num_compared > 8


PROMPT = st.sampled_from([(6,), (1, 1), (7, 8, 3), *map(tuple, PROMPTS)])
SAMPLING = st.sampled_from([None, None, *KINDS["sampled"], *KINDS["mixed"]])


@settings(max_examples=10)
@given(
    rows=st.lists(st.tuples(PROMPT, st.integers(1, 14), SAMPLING), min_size=1, max_size=5),
    arch=st.sampled_from(ARCHES),
    shape=st.sampled_from(sorted(SHAPES)),
    backend=st.sampled_from(["ragged", "padded"]),
    batch_size=st.integers(1, 4),
    max_step_tokens=st.sampled_from([64, 6]),
)
def test_no_token_depends_on_the_heads(
    rows: Any, arch: str, shape: str, backend: str, batch_size: int, max_step_tokens: int
) -> None:
    options = SHAPES[shape] | {"path": random_heads(arch, 1)[0]}
    steps = {"max_step_tokens": max_step_tokens} if backend == "ragged" else {}
    engine = trial().make_engine(options, backend, batch_size=batch_size, **steps)
    requests = [Request(str(row), prompt, num_new, sampling=kind) for row, (prompt, num_new, kind) in enumerate(rows)]
    for generation in engine.run(requests):
        prompt, num_new, kind = rows[int(generation.request_id)]
        assert generation.token_ids == trial().text(generation.request_id, prompt, kind, num_new)


@looped(
    ("options", "words"),
    [
        ({"path": None}, "give drafter.path=FOLDER"),
        ({"path": "./nowhere"}, "there is no such folder"),
        ({"tree": "statics"}, "drafter.tree is 'statics'; did you mean 'static'"),
        ({"static_tree": "none"}, "drafter.static_tree is 'none'; choose one of mc_sim_7b_63"),
        ({"depth": 0}, "drafter.depth is 0; it must be at least 1"),
        ({"num_nodes": 0}, "drafter.num_nodes is 0; it must be at least 1"),
        ({"top_k": 0}, "drafter.top_k is 0; it must be at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        trial().make_engine(options)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_it_is_offered() -> None:
    engine = Engine.assemble(
        trial().target,
        None,
        drafter=HydraConfig(path=heads_path(), tree=TreeKind.chain),
        backend="ragged",
        budget="fixed",
        options=EngineOptions(batch_size=4, on_drafter_error=OnDrafterError.fail),
    )
    trial().engine = engine
    trial().decode()
    assert trial().is_full()
