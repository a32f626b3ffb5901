"""Union: every drafter drafts for every row, and one tree of all their drafts is verified.

Miao et al. 2023, "SpecInfer", arXiv 2305.09781, §3 (merge-based speculation) and Definition 3.2: the merged tree holds
every path of every tree, and each path once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from heapq import merge as in_turn
from typing import NamedTuple

from emssd.attention import Parents, to_host
from emssd.drafting import CheckedDrafter, Draft, Drafter, Outcome
from emssd.sequences import Batch

__all__ = ["UnionDrafter"]


class RowDraft(NamedTuple):
    """The draft of one row, of which each is ``[n]``; see `emssd.drafting.Draft`."""

    token_ids: Seq[int]
    parents: Parents
    confidence: Seq[float] | None = None


class _Proposed(NamedTuple):
    """The draft of one drafter in this step: the draft itself, and its ids on the host, by row."""

    draft: Draft
    rows: list[RowDraft]


class UnionDrafter(Drafter):
    """Merges the drafts of several drafters into one tree per row.

    Ids that a drafter leaves on a device are brought to the host, as merging compares them: the host waits for that
    drafter. Each drafter observes the outcome of its own draft, as if that alone had been verified: the beginning of it
    that was left in the tree, the accepted nodes among these, and the target's choice after each.
    """

    drafts_trees = True

    def __init__(self, drafters: Seq[CheckedDrafter]) -> None:
        self.drafters = tuple(drafters)
        self.replays = "; ".join(said for each in drafters if (said := each.drafter.replays)) or None
        self.hidden_layers = tuple(sorted({layer for each in drafters for layer in each.hidden_layers}))
        self._names: tuple[str, ...] = ()  # of the rows that were drafted for last
        self._proposed: list[_Proposed] = []  # by drafter

    @property
    def num_speculative_tokens(self) -> int:  # type: ignore[override]  # read-only: a drafter may fail on the way
        """The most tokens of all drafters together."""
        return sum(drafter.num_speculative_tokens for drafter in self.drafters)

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._names, self._proposed = (), []
        proposed = [_asked(drafter, batch, budget) for drafter in self.drafters]
        rows = [merge([each.rows[row] for each in proposed], limit) for row, limit in enumerate(budget)]
        self._names, self._proposed = tuple(batch.request_ids), proposed
        return _joined(rows)

    def observe(self, outcome: Outcome) -> None:
        draft = outcome.draft
        rows = _rows(draft, to_host(draft.token_ids))
        if not self._proposed or tuple(outcome.batch.request_ids) != self._names:  # nothing was drafted for these
            self._proposed = [_Proposed(Draft.empty(len(rows)), [RowDraft((), ())] * len(rows)) for _ in self.drafters]
        trees = [children_of(row) for row in rows]
        with ExitStack() as everybody:
            for drafter, proposed in reversed(list(zip(self.drafters, self._proposed, strict=True))):
                everybody.callback(drafter.observe, _own(outcome, proposed, trees))
        self._names, self._proposed = (), []

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        with ExitStack() as everybody:
            for drafter in reversed(self.drafters):
                everybody.callback(drafter.release, request_ids)

    def reset(self) -> None:
        for drafter in self.drafters:
            drafter.reset()


def _asked(drafter: CheckedDrafter, batch: Batch, budget: Seq[int]) -> _Proposed:
    most = drafter.num_speculative_tokens
    limits = [min(limit, most) for limit in budget]
    if not drafter.drafts_trees:  # a chain ends before the row does
        limits = [min(limit, max(0, row.num_remaining - 1)) for row, limit in zip(batch, limits, strict=True)]
    draft = drafter.propose(batch, limits)
    ids = to_host(draft.token_ids)
    if not draft.on_host:
        drafter.check_ids(ids)
        if drafter.failure:
            return _Proposed(Draft.empty(len(batch)), [RowDraft((), ())] * len(batch))
    return _Proposed(draft, _rows(draft, ids))


def _rows(draft: Draft, ids: Seq[int]) -> list[RowDraft]:
    sure, bounds = draft.confidence, zip(draft.indptr, draft.indptr[1:], strict=False)
    return [
        RowDraft(ids[start:stop], draft.tree(row), None if sure is None else sure[start:stop])
        for row, (start, stop) in enumerate(bounds)
    ]


def _joined(rows: Seq[RowDraft]) -> Draft:
    """One draft of all rows; it tells its confidence if every row has one."""
    sure = [row.confidence for row in rows if row.confidence is not None]
    nodes = [list(zip(row.token_ids, row.parents, strict=True)) for row in rows]
    return Draft.from_trees(nodes, sure if len(sure) == len(rows) else None)


def _own(outcome: Outcome, proposed: _Proposed, trees: Seq[dict[tuple[int, int], int]]) -> Outcome:
    """The outcome of one drafter's draft, of the merged one with these edges in each row."""
    accepted, targets, lengths = list[Seq[int]](), list[Seq[int]](), list[int]()
    for row, children, right, chosen in zip(proposed.rows, trees, outcome.accepted, outcome.target_ids, strict=True):
        found = places(row, children)
        path = accepted_nodes(row.parents, found, set(right))
        lengths.append(len(found))
        accepted.append(range(len(path)) if proposed.draft.parents is None else path)
        targets.append([*chosen[:1], *(chosen[place + 1] for place in found)])
    return Outcome(outcome.batch, proposed.draft.cut(lengths), tuple(accepted), tuple(targets), hidden=outcome.hidden)


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
