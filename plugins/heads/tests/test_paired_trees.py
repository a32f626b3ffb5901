"""The trees that are drafted are those of the papers, computed anew for each node from the tokens alone. float64."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence as Seq
from functools import cached_property
from importlib.resources import files
from typing import Any

import pytest
import torch

from emssd.drafting import Draft, Drafter, DrafterContext
from emssd.sequences import Batch, Request
from tests.support.heads import Weights, dense_layer, dense_rms
from tests.support.perfect_head import DRAFTED, random_head
from tests.support.right_drafters import target, trial
from tests.support.right_drafts import PROMPTS, Load
from tests.support.tiers import looped
from tests.support.trees import paths_of

NUM_NEW, EPS = 12, 1e-6
PATHS = json.loads(files("emssd_heads").joinpath("trees.json").read_text())["mc_sim_7b_63"]
MTP, TARGET_EPS = "model.layers.3.", 1e-12  # the layer is one more of the target's
Path = tuple[int, ...]


class Naive:
    """A head after a text, without a cache: a node's output is that of the whole text and the way to the node.

    Args:
        head: its kind.
        weights, config: of the head.
        tokens: the text.
    """

    def __init__(self, head: str, weights: Weights, config: Any, tokens: Seq[int]) -> None:
        self.head, self.weights, self.config, self.tokens = head, weights, config, list(tokens)
        self.w = {name: each.double() for name, each in weights.items()}
        self.outputs: dict[Path, torch.Tensor] = {}

    @cached_property
    def features(self) -> torch.Tensor:
        """``[n - 1, size]`` of all tokens but the last."""
        said = target().model(torch.tensor([self.tokens[:-1]]), output_hidden_states=True).hidden_states
        if self.head in ("eagle", "mtp"):
            return said[-1][0]  # Transformers' last one is after the norm
        return torch.cat([said[0][0], said[2][0]], -1) @ self.w["fc.weight"].T

    def output(self, path: Path) -> torch.Tensor:
        """After the last pair, or after the last node of a path."""
        if path not in self.outputs:
            if self.head == "peagle":
                fed_back, further = [self.w["mask_hidden"][0, 0] @ self.w["fc.weight"].T] * len(path), [7] * len(path)
                table = self.w["embed_tokens.weight"]
            else:
                fed_back, further = [self.output(path[:place]) for place in range(len(path))], list(path)
                table = target().model.get_input_embeddings().weight
            features = torch.cat([self.features, *(each[None] for each in fed_back)])
            out = self.layer(table[torch.tensor([*self.tokens[1:], *further])], features)[-1]
            if self.head == "mtp":
                out = dense_rms(out, self.w[f"{MTP}shared_head.norm.weight"], TARGET_EPS)
            self.outputs[path] = out
        return self.outputs[path]

    def layer(self, embeds: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        w, places = self.w, range(len(embeds))
        if self.head == "eagle":
            fused = torch.cat([embeds, features], -1) @ w["fc.weight"].T + w["fc.bias"]
            return dense_layer(self.weights, "layers.0.", self.config, fused, fused, places)
        if self.head == "mtp":
            halves = (embeds, "enorm"), (features, "hnorm")
            normed = [dense_rms(half, w[f"{MTP}{name}.weight"], TARGET_EPS) for half, name in halves]
            fused = torch.cat(normed, -1) @ w[f"{MTP}eh_proj.weight"].T
            attended = dense_rms(fused, w[f"{MTP}input_layernorm.weight"], TARGET_EPS)
            return dense_layer(self.weights, MTP, self.config, fused, attended, places)
        normed = dense_rms(embeds, w["midlayer.input_layernorm.weight"], EPS)
        attended = torch.cat([normed, dense_rms(features, w["midlayer.hidden_norm.weight"], EPS)], -1)
        return dense_layer(self.weights, "midlayer.", self.config, features, attended, places)

    def likeliest(self, path: Path, width: int) -> list[tuple[int, float]]:
        """Tokens and their logarithms of probability, the likeliest first."""
        out = self.output(path)
        if self.head == "eagle":
            logits, ids = out @ target().model.lm_head.weight.T, list(range(9))
        elif self.head == "mtp":
            logits, ids = out @ self.w[f"{MTP}shared_head.head.weight"].T, list(range(9))
        else:
            logits, ids = dense_rms(out, self.w["norm.weight"], EPS) @ self.w["lm_head.weight"].T, DRAFTED
        shares, places = logits.log_softmax(-1).topk(min(width, len(ids)))
        return [(ids[place], share) for place, share in zip(places.tolist(), shares.tolist(), strict=True)]

    def static(self) -> dict[Path, float]:
        """EAGLE-1: the tokens of the published ranks, as far as the head drafts so many."""
        ways: dict[Path, Path] = {(): ()}
        found = {}
        for ranks in map(tuple, PATHS):
            tokens = self.likeliest(ways[ranks[:-1]], 4)
            token, share = tokens[ranks[-1]]
            ways[ranks] = (*ways[ranks[:-1]], token)
            found[ways[ranks]] = math.exp(share)
        return found

    def dynamic(self, num_nodes: int, depth: int, top_k: int) -> dict[Path, float]:
        """EAGLE-2, Algorithm 1 of its appendix: expand the best of each level, and rank all again in the end."""
        beam, pool, own = {(): 0.0}, dict[Path, float](), dict[Path, float]()
        for _ in range(depth):
            level = {}
            for path, score in beam.items():
                for token, share in self.likeliest(path, top_k):
                    level[(*path, token)] = score + share
                    own[(*path, token)] = math.exp(share)
            pool |= level
            beam = dict(sorted(level.items(), key=lambda each: -each[1])[:top_k])
        return {path: own[path] for path in sorted(pool, key=lambda path: -pool[path])[:num_nodes]}


def drafted(draft: Draft, row: int) -> dict[Path, float]:
    """The nodes of a row as paths of tokens, and how sure the drafter is of each."""
    (start, stop), paths = draft.indptr[row : row + 2], paths_of(draft, row)
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, (draft.confidence or ())[start:stop], strict=True))


@looped("backend", ["ragged", "padded"])
@looped(
    ("options", "wanted"),
    [
        ({"tree": "static"}, Naive.static),
        ({"tree": "dynamic", "num_nodes": 11, "depth": 3, "top_k": 3}, lambda naive: naive.dynamic(11, 3, 3)),
        ({"tree": "chain", "depth": 3}, lambda naive: naive.dynamic(3, 3, 1)),
    ],
)
@pytest.mark.parametrize("head", ["eagle", "eagle3", "peagle", "mtp"])
def test_trees_are_those_of_the_papers(head: str, options: Any, wanted: Any, backend: str) -> None:
    made, num_compared = random_head(head), 0
    plugin, more = (head, {}) if head in ("eagle", "mtp") else ("eagle3", {"layer_ids": "hs"})

    def watched(load: Load) -> Load:
        def loaded(options: Any, context: DrafterContext) -> Drafter:
            drafter: Any = load(options, context)
            drafter.shape.temperature, propose = 1.0, drafter.propose

            def compared(batch: Batch, budget: Seq[int]) -> Draft:
                nonlocal num_compared
                draft = propose(batch, budget)
                for place, row in enumerate(batch):
                    if row.num_remaining > 5 and (found := drafted(draft, place)):
                        naive = Naive(head, made.weights, made.config, row.tokens)
                        assert found == pytest.approx(wanted(naive), rel=1e-6)
                        num_compared += 1
                return draft

            drafter.propose = compared
            return drafter

        return loaded

    own = trial(plugin)
    own.load = watched(own.load)
    engine = own.make_engine(options | more | {"path": made.path}, backend)
    list(engine.run([Request(str(row), tuple(prompt), NUM_NEW) for row, prompt in enumerate(PROMPTS[:2])]))
    assert num_compared >= 4
