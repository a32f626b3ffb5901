"""`ResidualRule`, and the rules that it follows: which nodes of a drawn tree are accepted, and the token after them.

Arguments that these share, for the tree of one row with ``n`` nodes:

- ``target [1 + n, vocab]``: the target's distribution after the row's newest token, then after each node, after
  temperature, top-k and all other processing; float64.
- ``draft [1 + n, vocab]``: at the same places, the distribution that the node's children were drawn from, before any of
  them was. What stands after nodes without children is not read.
- ``token_ids``, ``parents [n]``: parents precede children, and siblings stand in the order in which they were drawn.
- ``uniform``: gives the next number in [0, 1), independent of all before and of the draft, each time that it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from emssd.attention.trees import path
from emssd.decoding.choosing import drawn_nodes
from emssd.decoding.verify import SharedNoise
from emssd.drafting import Draft
from emssd.drafting.rule import LawReport, Verified
from emssd.model import ModelRunner
from emssd.sampling.choice import probabilities
from emssd.sequences import Generation, Row
from emssd_residual.distributions import Uniform, choose, excess, number, uniforms, without
from emssd_residual.drafts import Drawn
from emssd_residual.law import check_distribution

__all__ = ["ResidualRule", "Verdict", "verify_deterministic", "verify_traversal"]

Rows = torch.Tensor | Seq[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens that a step emits for one row: those of accepted nodes, from the origin down, and one after them."""

    path: list[int]
    token: int


class ResidualRule(SharedNoise):
    """Verifies a row that was drawn with a known ``q`` by traversal, and rows of other methods by shared noise.

    In a draft without a ``q``, the tokens that the target draws itself are accepted. They are not drawn with the noise
    of `coupled` sampling. A drafter can compute that noise beforehand, so whether it gives a ``q`` could depend on it.

    On a GPU, the host waits several times for each node.
    """

    def verify(
        self, logits: torch.Tensor, rows: Seq[Row], draft: Draft, candidates: torch.Tensor | None = None
    ) -> list[Verified]:
        verified, draft = super().verify(logits, rows, draft, candidates), draft.within(logits.shape[1])
        for row, result in enumerate(verified):
            params = result.row.request.sampling
            if params is None or not params.is_residual:
                continue
            nodes, first = list(drawn_nodes(result.row, draft, row)), draft.indptr[row] + row
            target = probabilities(logits[first : first + len(nodes)], nodes)
            numbers = uniforms(nodes[0].key, "verify", len(result.row.tokens))
            tokens, tree = draft.tokens(row), draft.tree(row)
            extra = None if draft.extra is None else draft.extra[row]
            if isinstance(extra, Drawn):
                verdict = verify_traversal(target, extra.q, tokens, tree, numbers)
            else:
                verdict = verify_deterministic(target, (), tokens, tree, numbers)
            result.accepted, result.new_tokens = verdict.path, [*(tokens[node] for node in verdict.path), verdict.token]
            for node, token in zip((-1, *verdict.path), result.new_tokens, strict=True):
                result.target_ids[node + 1] = token
        return verified

    def check(self, generations: Seq[Generation], runner: ModelRunner, rows: Mapping[str, Row]) -> LawReport:
        return check_distribution(generations, runner, rows)


def verify_traversal(
    target: torch.Tensor, draft: Rows, token_ids: Seq[int], parents: Seq[int], uniform: Callable[[], Uniform]
) -> Verdict:
    """Traversal verification (Weng et al. 2025, arXiv 2505.12398): from the leaves up, the first accepted node wins.

    On a chain it is block verification (Sun et al. 2024, arXiv 2403.10444).

    ``alpha`` of a node is how likely it is accepted, with its way, once its children are rejected. A child starts with
    ``min(1, alpha p/q)`` of its parent. Its rejection leaves the parent ``Z/(Z + 1 - alpha)``, where ``Z`` is the sum
    of ``max(alpha p - q, 0)``, and leaves that in proportion for ``p``. No alpha depends on chance, so all are known
    before the first number is drawn.
    """
    alphas, left, drawable = list[Any]([1]), [target[0]], [draft[0]]
    for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
        at, alpha = parent + 1, 0
        if alphas[at] > 0 and (chance := number(drawable[at][token])) > 0:
            alpha = min(1, alphas[at] * number(left[at][token]) / chance)
            mass, left[at] = excess(alphas[at], left[at], drawable[at])
            if alphas[at] != 1:  # which it stays also where p = q, as no child is ever rejected there
                alphas[at] = mass / (mass + (1 - alphas[at]))
            drawable[at] = without(drawable[at], token)
        alphas.append(alpha)
        left.append(target[node + 1])
        drawable.append(draft[node + 1])
    for node in _children_first(parents):
        if alphas[node + 1] > 0 and uniform() < alphas[node + 1]:
            return Verdict(path(parents, node), choose(left[node + 1], uniform()))
    return Verdict([], choose(left[0], uniform()))


def verify_deterministic(
    target: torch.Tensor, draft: Rows, token_ids: Seq[int], parents: Seq[int], uniform: Callable[[], Uniform]
) -> Verdict:
    """Draw the target's own token after each node, and descend to the child that carries it, if there is one.

    `draft` is not read. The output has the target's law for any tree that was made without `uniform`; it may be chosen,
    sorted and trimmed by what its tokens are. On chains with one-hot ``q``, this accepts as much as the rules that read
    it.
    """
    children, nodes = _children(parents), [-1]
    while True:  # nodes have the same way; there are several where a token was drafted twice
        token = choose(target[nodes[0] + 1], uniform())
        following = [child for node in nodes for child in children[node + 1] if token_ids[child] == token]
        if not following:
            return Verdict(path(parents, nodes[0]), token)
        nodes = following


def _children(parents: Seq[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        children[parent + 1].append(node)
    return children


def _children_first(parents: Seq[int]) -> list[int]:
    """``[n]`` all nodes, each after its children and after its earlier siblings with all below them."""
    children, order, waiting = _children(parents), list[int](), [-1]
    while waiting:
        order.append(node := waiting.pop())
        waiting.extend(children[node + 1])  # the last sibling comes out first, and the order is turned round below
    return order[:0:-1]
