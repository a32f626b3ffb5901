"""The trees that are drafted are those of the papers, computed anew for each node from the tokens alone. float64."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence as Seq
from importlib.resources import files
from typing import Any

import pytest
import torch

from emssd.drafting import Draft
from emssd.sequences import Batch, Request
from tests.support.heads import causal
from tests.support.hidden import right_states
from tests.support.random_drafters import random_head
from tests.support.right_drafters import target, trial
from tests.support.right_drafts import PROMPTS
from tests.support.tiers import looped
from tests.support.trees import eagle2_tree, paths_of

NUM_NEW = 12
PATHS = json.loads(files("emssd_heads").joinpath("trees.json").read_text())["mc_sim_7b_63"]
Path = tuple[int, ...]


class Naive:
    """The head of a drafter after a text, without a cache: a node's output is that of the whole text and its path."""

    def __init__(self, drafter: Any, tokens: Seq[int]) -> None:
        self.head, self.tokens, self.outputs = drafter._head, list(tokens), dict[Path, torch.Tensor]()
        states = right_states(target().model, self.tokens[:-1], drafter.hidden_layers)
        self.features, self.mask = self.head.features(torch.cat(states, -1)), getattr(self.head, "mask_token_id", None)

    def output(self, path: Path) -> torch.Tensor:
        """After the last pair, or after the last node of a path."""
        if path not in self.outputs:
            further, fed_back = list(path), [self.output(path[:length])[None] for length in range(len(path))]
            if self.mask is not None:
                further, fed_back = [self.mask] * len(path), [self.head.mask_feature()] * len(path)
            ids = torch.tensor([*self.tokens[1:], *further])
            embeds = self.head.embed(ids, target().model.get_input_embeddings())
            pairs = torch.cat([embeds, torch.cat([self.features, *fed_back])], -1)[None]
            self.outputs[path] = self.head(pairs, torch.arange(len(ids))[None], causal)[0, -1]
        return self.outputs[path]

    def likeliest(self, path: Path, width: int) -> list[tuple[int, float]]:
        """Tokens and their logarithms of probability, the likeliest first."""
        logits = self.head.logits(self.output(path)[None], target().model.lm_head)[0]
        shares, columns = logits.log_softmax(-1).topk(min(width, len(logits)))
        return list(zip(self.head.to_target(columns).tolist(), shares.tolist(), strict=True))

    def static(self) -> dict[Path, float]:
        """EAGLE-1: the tokens of the published ranks, as far as the head drafts so many."""
        paths, shares = {(): ()}, dict[Path, float]()
        for ranks in map(tuple, PATHS):
            token, share = self.likeliest(paths[ranks[:-1]], 4)[ranks[-1]]
            paths[ranks] = (*paths[ranks[:-1]], token)
            shares[paths[ranks]] = math.exp(share)
        return shares


@looped("backend", ["ragged", "padded"])
@looped(
    ("options", "wanted"),
    [
        ({"tree": "static"}, Naive.static),
        ({"tree": "dynamic", "num_nodes": 11, "depth": 3, "top_k": 3}, lambda n: eagle2_tree(n.likeliest, 11, 3, 3)),
        ({"tree": "chain", "depth": 3}, lambda naive: eagle2_tree(naive.likeliest, 3, 3, 1)),
    ],
)
@pytest.mark.parametrize("head", ["eagle", "eagle3", "peagle", "mtp"])
def test_trees_are_those_of_the_papers(head: str, options: Any, wanted: Any, backend: str) -> None:
    num_compared = 0
    plugin, more = (head, {}) if head in ("eagle", "mtp") else ("eagle3", {"layer_ids": "hs"})
    engine = trial(plugin).make_engine(options | more | {"path": random_head(head)}, backend)
    drafter: Any = engine.drafting.drafters[0].drafter
    drafter.shape.temperature, propose = 1.0, drafter.propose

    def compared(batch: Batch, budget: Seq[int]) -> Draft:
        nonlocal num_compared
        draft = propose(batch, budget)
        for index, row in enumerate(batch):
            paths, start = paths_of(draft, index), draft.indptr[index]
            if row.num_remaining > 5 and paths:
                drafted = dict(zip(paths, draft.confidence[start : start + len(paths)], strict=True))
                assert len(drafted) == len(paths)
                assert drafted == pytest.approx(wanted(Naive(drafter, row.tokens)), rel=1e-6)
                num_compared += 1
        return draft

    drafter.propose = compared
    list(engine.run([Request(str(row), tuple(prompt), NUM_NEW) for row, prompt in enumerate(PROMPTS[:2])]))
    assert num_compared >= 4
