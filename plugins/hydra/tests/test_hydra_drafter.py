"""Heads that their target always agrees with are always accepted, and with any fault in what they are fed they are not.

Oracles: plain decoding and sampling by hand, without a cache; each draft computed anew from formulas, dense, node by
node. float64.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from emssd_hydra.drafter import HydraDrafter

from emssd.drafters.heads.options import read_trees
from emssd.drafting import Draft
from emssd.sequences import Batch
from tests.support import right_drafters
from tests.support.heads import Weights, dense_layer, dense_rms, layer_weights, random_weights, write_head
from tests.support.hidden import right_states
from tests.support.perfect_head import SIZE, VOCAB
from tests.support.perfect_hydra import PREFIX
from tests.support.right_drafts import PROMPTS, Trial
from tests.support.trees import paths_of

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain"},
    "static": {"tree": "static"},
    "dynamic": {"tree": "dynamic", "num_nodes": 14, "top_k": 3},
}
ARCHES = ["mlp", "prefix-mlp"]


@cache
def trial() -> Trial:
    return right_drafters.trial("hydra")


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
        """Return what may follow `path`, the most probable first, with its logarithm."""
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
        found, paths = {(): 0.0}, {(): ()}
        for way in read_trees("emssd_hydra")["mc_sim_7b_63"]:
            if len(way) <= depth and way[-1] < VOCAB and (path := paths.get(way[:-1])) is not None:
                log, token = self.children(path)[way[-1]]
                paths[way] = (*path, token)
                found[paths[way]] = found[path] + log
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
            paths, start = paths_of(draft, at), draft.indptr[at]
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
