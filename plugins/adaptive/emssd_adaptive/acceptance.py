"""The chance that a drafted node is accepted, learnt from what was accepted before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from emssd.drafting import Draft

__all__ = ["FIRST", "LATER", "Acceptance", "Counts"]

FIRST, LATER = 0, 1  # kinds of nodes: of a chain without confidences, or of a draft that is yet to be made
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # of the bins of confidence
_MIDDLES = [(low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True)]
_GUESSES = [0.5, 0.8, *_MIDDLES, *_MIDDLES]  # shares until something is known; bins of first children, and of others
_BY_RANK = 0.7  # of a first child in a tree without confidences; a later one has this share of the one before it
_GUESSED, _OF_RUN = 2.0, 6.0  # nodes that a guess counts for, and that the run's share does in a row
_FADE, _FADE_UNDRAFTED = 0.99, 0.97  # a step with drafts, of the run; a step without, of a row
_TRIED_BEFORE = 4.0  # nodes of a kind that count beside those of a try, as they are old


class Counts(dict[int, list[float]]):
    """By kind of node, how many were accepted, and how many the target could accept; they fade.

    Attributes:
        step: up to which they have faded.
        num_shown: tokens of the row that the drafter has seen.
    """

    step = num_shown = 0

    def fade(self, factor: float) -> None:
        """Let all counts fade."""
        for count in self.values():
            count[:] = count[0] * factor, count[1] * factor

    def add(self, nodes: Iterable[tuple[int, float, float]]) -> None:
        """Count nodes: their kind, how many were accepted, and their number."""
        for kind, accepted, number in nodes:
            before = self.get(kind, (0.0, 0.0))
            self[kind] = [before[0] + accepted, before[1] + number]


class Acceptance:
    """Chances of a drafter's nodes, each given that its parent is accepted and that no earlier sibling is.

    A node's kind is the bin of its confidence. Its chance is the share of nodes of this kind that were accepted: of
    about the last `memory` nodes of the row, and of the run's, which count for a few.
    """

    def __init__(self, memory: float) -> None:
        self._memory, self._run, self._rows, self._step = max(memory, 1.0), Counts(), dict[str, Counts](), 0

    def row(self, request_id: str) -> Counts:
        """The record of a row by now."""
        row = self._rows.setdefault(request_id, Counts())
        if row.step < self._step:
            row.fade(_FADE_UNDRAFTED ** (self._step - row.step))
            row.step = self._step
        return row

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these rows."""
        for request_id in request_ids:
            self._rows.pop(request_id, None)

    def chance(self, kind: int, row: Counts) -> float:
        """The chance of a node of this kind in this row."""
        right, tried = self._run.get(kind, (0.0, 0.0))
        share, (right, tried) = (right + _GUESSED * _GUESSES[kind]) / (tried + _GUESSED), row.get(kind, (0.0, 0.0))
        return (right + _OF_RUN * share) / (tried + _OF_RUN)

    def worths(self, draft: Draft, index: int, row: Counts) -> list[float]:
        """``[n]`` the probability that each node of a row's draft is accepted, with all on the path to it."""
        kinds, worths = _kinds(draft, index), list[float]()
        chances = {kind: self.chance(kind, row) for kind in set(kinds)}
        left = [1.0] + [0.0] * len(kinds)  # by parent: that it is accepted, and none of its children so far is
        for node, (parent, kind) in enumerate(zip(draft.tree(index), kinds, strict=True)):
            worth = left[node + 1] = left[parent + 1] * chances[kind]
            left[parent + 1] -= worth
            worths.append(worth)
        return worths

    def observe(self, draft: Draft, index: int, accepted: Seq[int], row: Counts) -> None:
        """Learn from a row's draft and its accepted nodes. What comes after the target's choice teaches nothing."""
        path, decided, nodes = {-1, *accepted}, set[int](), list[tuple[int, float, float]]()
        for node, (parent, kind) in enumerate(zip(draft.tree(index), _kinds(draft, index), strict=True)):
            if parent in path and parent not in decided:
                nodes.append((kind, node in path, 1.0))
                if node in path:
                    decided.add(parent)
        row.fade((1.0 - 1.0 / self._memory) ** len(nodes))
        row.add(nodes)
        self._run.add(nodes)

    def expect(self, worths: Seq[float], limit: int, row: Counts) -> None:
        """Learn the worth of drafts that are yet to be made from one of at most `limit` nodes, also if it has none."""
        first, others = (worths[0], sum(worths[1:])) if worths else (0.0, 0.0)
        nodes = [(FIRST, first, 1.0), (LATER, others, sum(worths[: limit - 1]))]
        row.add(nodes)
        self._run.add(nodes)

    def end_step(self, *, with_drafts: bool) -> None:
        """A step has passed."""
        self._step += 1
        if with_drafts:
            self._run.fade(_FADE)

    def look_anew(self) -> None:
        """Count little of what was seen until now, as a try is to be observed."""
        for count in self._run.values():
            factor = _TRIED_BEFORE / max(count[1], _TRIED_BEFORE)
            count[:] = count[0] * factor, count[1] * factor


def _kinds(draft: Draft, index: int) -> list[int]:
    """The kind of each node of a row."""
    start, stop = draft.indptr[index], draft.indptr[index + 1]
    if draft.parents is None and draft.confidence is None:
        return [LATER if node else FIRST for node in range(stop - start)]
    ranks, num_children = list[int](), [0] * (stop - start + 1)
    for parent in draft.tree(index):
        ranks.append(num_children[parent + 1])
        num_children[parent + 1] += 1
    confidence: Seq[float] = [_BY_RANK ** (rank + 1) for rank in ranks]
    if draft.confidence is not None:
        confidence = draft.confidence[start:stop]
    firsts, others = 2, 2 + len(_MIDDLES)
    return [bisect_right(_EDGES, c) + (others if rank else firsts) for rank, c in zip(ranks, confidence, strict=True)]
