"""Merges the drafts of one row into one tree, and finds the nodes of each in what is left of it.

Miao et al. 2023, "SpecInfer", arXiv 2305.09781, §3 (merge-based speculation) and Definition 3.2: the merged tree holds
every path of every tree, and each path once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from heapq import merge as in_turn
from typing import NamedTuple

from emssd.attention import Parents

__all__ = ["RowDraft", "accepted_nodes", "children_of", "merge", "places"]


class RowDraft(NamedTuple):
    """The draft of one row.

    Attributes:
        token_ids: ``[n]``.
        parents: ``[n]``, as in `emssd.drafting.Draft`.
        confidence: ``[n]``, as there, or ``None``.
    """

    token_ids: Seq[int]
    parents: Parents
    confidence: Seq[float] | None = None


def merge(drafts: Seq[RowDraft], num_nodes: int) -> RowDraft:
    """One tree of up to `num_nodes` nodes, without siblings of the same token.

    Each draft gives its nodes in its own order, so that the first nodes of the tree hold the beginning of every draft.
    Where all of them tell their confidence, the next node is the one of the likeliest path, else they take turns.
    A node that several drafts have is as likely as the surest of them says.
    """
    filled = [draft for draft in drafts if draft.token_ids]
    tokens, parents, confidence = list[int](), list[int](), list[float]()
    known: dict[tuple[int, int], int] = {}
    nodes: list[list[int]] = [[] for _ in filled]  # of the tree, by those of each draft
    for which, node in _turns(filled):
        draft = filled[which]
        parent = draft.parents[node]
        edge = (nodes[which][parent] if parent >= 0 else -1, draft.token_ids[node])
        if edge not in known:
            if len(tokens) == num_nodes:
                break
            known[edge] = len(tokens)
            parents.append(edge[0])
            tokens.append(edge[1])
            confidence.append(0.0)
        place = known[edge]
        nodes[which].append(place)
        if draft.confidence is not None:
            confidence[place] = max(confidence[place], draft.confidence[node])
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
    """The product of confidence on the way to each node."""
    found: list[float] = []
    for parent, own in zip(draft.parents, draft.confidence or (), strict=True):
        found.append(own * found[parent] if parent >= 0 else own)
    return found


def children_of(tree: RowDraft) -> dict[tuple[int, int], int]:
    """The nodes of a merged tree, by parent and token."""
    edges = zip(tree.parents, tree.token_ids, strict=True)
    return {edge: node for node, edge in enumerate(edges)}


def places(draft: RowDraft, children: Mapping[tuple[int, int], int]) -> list[int]:
    """The places of the first nodes of `draft` in a merged tree; it ends before the first that was cut away."""
    found: list[int] = []
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        place = children.get((found[parent] if parent >= 0 else -1, token))
        if place is None:
            break
        found.append(place)
    return found


def accepted_nodes(parents: Parents, found: Seq[int], accepted: Collection[int]) -> list[int]:
    """The longest path of a draft's first nodes, which are at the places `found`, of those `accepted` in the tree."""
    paths: dict[int, list[int]] = {-1: []}
    for node, (place, parent) in enumerate(zip(found, parents, strict=False)):
        if parent in paths and place in accepted:
            paths[node] = [*paths[parent], node]
    return max(paths.values(), key=len)
