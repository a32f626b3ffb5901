"""Union: every drafter drafts for every row, and one tree of all their drafts is verified.

Miao et al. 2023, "SpecInfer", arXiv 2305.09781, §3 (merge-based speculation) and Definition 3.2: the merged tree holds
every path of every tree, and each path once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import replace
from heapq import merge as in_turn
from typing import NamedTuple

import torch

from emssd.attention import Parents, to_host
from emssd.drafting import CheckedDrafter, Draft, Drafter, Outcome
from emssd.sequences import Batch

__all__ = ["UnionDrafter"]


class RowDraft(NamedTuple):
    """The draft of one row, of which each is ``[n]``; see `emssd.drafting.Draft`."""

    token_ids: Seq[int]
    parents: Parents
    confidence: Seq[float] | None = None


class UnionDrafter(Drafter):
    """Merges the drafts of several drafters into one tree per row.

    Ids that a drafter leaves on a device are brought to the host, as merging compares them: the host waits for that
    drafter. Each drafter observes the outcome of its own draft, as if that alone had been verified: the beginning of it
    that was left in the tree, the accepted nodes among these, and the target's choice after each.
    """

    drafts_trees = True

    def __init__(self, drafters: Seq[CheckedDrafter]) -> None:
        self.drafters = tuple(drafters)
        self.replays = "; ".join(what for one in drafters if (what := one.drafter.replays)) or None
        self.hidden_layers = tuple(sorted({layer for one in drafters for layer in one.hidden_layers}))
        self._names: tuple[str, ...] = ()  # of the rows that were drafted for last
        self._proposed: list[Draft] = []  # by drafter

    @property
    def num_speculative_tokens(self) -> int:  # type: ignore[override]  # read-only: a drafter may fail on the way
        """The most tokens of all drafters together."""
        return sum(drafter.num_speculative_tokens for drafter in self.drafters)

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._names, self._proposed = (), []
        proposed = [_on_host(drafter, batch, budget) for drafter in self.drafters]
        drafts = zip(*map(_rows, proposed), strict=True)
        rows = [merge(some, limit) for some, limit in zip(drafts, budget, strict=True)]
        self._names, self._proposed = tuple(batch.request_ids), proposed
        return _joined(rows)

    def observe(self, outcome: Outcome) -> None:
        if not self._proposed or tuple(outcome.batch.request_ids) != self._names:  # nothing was drafted for these
            self._proposed = [Draft.empty(len(outcome.batch))] * len(self.drafters)
        edges = [zip(row.parents, row.token_ids, strict=True) for row in _rows(outcome.draft)]
        trees = [{edge: node for node, edge in enumerate(tree)} for tree in edges]
        with ExitStack() as everybody:
            for drafter, proposed in reversed(list(zip(self.drafters, self._proposed, strict=True))):
                everybody.callback(drafter.observe, _of_one(outcome, proposed, trees))
        self._names, self._proposed = (), []

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        with ExitStack() as everybody:
            for drafter in reversed(self.drafters):
                everybody.callback(drafter.release, request_ids)

    def reset(self) -> None:
        for drafter in self.drafters:
            drafter.reset()


def _on_host(drafter: CheckedDrafter, batch: Batch, budget: Seq[int]) -> Draft:
    """The draft of `drafter`, with ids that the host has."""
    most = drafter.num_speculative_tokens
    limits = [min(limit, most) for limit in budget]
    if not drafter.drafts_trees:  # a chain ends before the row does
        limits = [min(limit, max(0, row.num_remaining - 1)) for row, limit in zip(batch, limits, strict=True)]
    draft = drafter.propose(batch, limits)
    if draft.on_host:
        return draft
    drafter.check_ids(ids := to_host(draft.token_ids))
    return Draft.empty(len(batch)) if drafter.failure else replace(draft, token_ids=torch.tensor(ids))


def _rows(draft: Draft) -> list[RowDraft]:
    sure, bounds = draft.confidence, zip(draft.indptr, draft.indptr[1:], strict=False)
    return [
        RowDraft(draft.tokens(row), draft.tree(row), None if sure is None else sure[start:stop])
        for row, (start, stop) in enumerate(bounds)
    ]


def _joined(rows: Seq[RowDraft]) -> Draft:
    """One draft of all rows; it tells its confidence if every row has one."""
    sure = [row.confidence for row in rows if row.confidence is not None]
    nodes = [list(zip(row.token_ids, row.parents, strict=True)) for row in rows]
    return Draft.from_trees(nodes, sure if len(sure) == len(rows) else None)


def _of_one(outcome: Outcome, proposed: Draft, trees: Seq[dict[tuple[int, int], int]]) -> Outcome:
    """The outcome of one drafter's draft, of the merged one with these edges in each row."""
    accepted, targets, lengths = list[Seq[int]](), list[Seq[int]](), list[int]()
    for row, children, right, chosen in zip(_rows(proposed), trees, outcome.accepted, outcome.target_ids, strict=True):
        nodes = merged_nodes(row, children)
        path = accepted_nodes(row.parents, nodes, set(right))
        lengths.append(len(nodes))
        accepted.append(range(len(path)) if proposed.parents is None else path)
        targets.append([*chosen[:1], *(chosen[node + 1] for node in nodes)])
    return Outcome(outcome.batch, proposed.cut(lengths), tuple(accepted), tuple(targets), hidden=outcome.hidden)


def merge(drafts: Seq[RowDraft], num_nodes: int) -> RowDraft:
    """One tree of up to `num_nodes` nodes, without siblings of the same token.

    Each draft gives its nodes in its own order, so that the first nodes of the tree hold the beginning of every draft.
    Where all of them tell their confidence, the next node is the one of the likeliest path, else they take turns.
    A node that several drafts have is as likely as the surest of them says.
    """
    filled = [draft for draft in drafts if draft.token_ids]
    tokens, parents, confidence = list[int](), list[int](), list[float]()
    edges: dict[tuple[int, int], int] = {}  # the node of each parent and token
    nodes: list[list[int]] = [[] for _ in filled]  # of the tree, by those of each draft
    for which, node in _turns(filled):
        draft = filled[which]
        parent = draft.parents[node]
        edge = (nodes[which][parent] if parent >= 0 else -1, draft.token_ids[node])
        if edge not in edges:
            if len(tokens) == num_nodes:
                break
            edges[edge] = len(tokens)
            parents.append(edge[0])
            tokens.append(edge[1])
            confidence.append(0.0)
        merged = edges[edge]
        nodes[which].append(merged)
        if draft.confidence is not None:
            confidence[merged] = max(confidence[merged], draft.confidence[node])
    sure = all(draft.confidence is not None for draft in filled)
    return RowDraft(tokens, parents, confidence if sure else None)


def _turns(drafts: Seq[RowDraft]) -> Iterator[tuple[int, int]]:
    sure = all(draft.confidence is not None for draft in drafts)
    turns = []
    for which, draft in enumerate(drafts):
        worths = _path_confidence(draft) if sure else [1.0] * len(draft.token_ids)
        turns.append([(-worth, node, which) for node, worth in enumerate(worths)])
    return ((which, node) for _, node, which in in_turn(*turns))


def _path_confidence(draft: RowDraft) -> list[float]:
    """The product of confidence on the path to each node."""
    products: list[float] = []
    for parent, confidence in zip(draft.parents, draft.confidence or (), strict=True):
        products.append(confidence * products[parent] if parent >= 0 else confidence)
    return products


def merged_nodes(draft: RowDraft, children: Mapping[tuple[int, int], int]) -> list[int]:
    """The nodes of a merged tree that the first nodes of `draft` became, up to the first that was cut away."""
    nodes: list[int] = []
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        node = children.get((nodes[parent] if parent >= 0 else -1, token))
        if node is None:
            break
        nodes.append(node)
    return nodes


def accepted_nodes(parents: Parents, nodes: Seq[int], accepted: Collection[int]) -> list[int]:
    """The longest path of a draft's first nodes, which became `nodes` of the merged tree, through `accepted` ones."""
    paths: dict[int, list[int]] = {-1: []}
    for node, (merged, parent) in enumerate(zip(nodes, parents, strict=False)):
        if parent in paths and merged in accepted:
            paths[node] = [*paths[parent], node]
    return max(paths.values(), key=len)
