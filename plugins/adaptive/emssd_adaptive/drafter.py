"""One drafter, as a budget policy sees it: the chance that its nodes are accepted, and the time that they take."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence as Seq
from itertools import compress

from emssd.drafting import Draft, Outcome, StageStats
from emssd_adaptive.cost import CostLine

__all__ = ["DrafterRecord"]

# Kinds: a later and the first token of a draft that is yet to be made; deviations from what was expected; bins of the
# confidence of first children, and of others. A row counts all bins together: one kind of first tokens, one of later.
_LATER, _FIRST, _SPREAD, _BINS = 0, 1, 2, 3
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # of the bins
_MIDDLES = [(low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True)]
_OTHERS = _BINS + len(_MIDDLES)
_GUESSES = [0.8, 0.5, 0.0, *_MIDDLES, *_MIDDLES]  # until something is known
_UNSURE = (0.5, 0.8)  # of first tokens and of later ones, if a drafter tells no confidence; to the power of the rank
_SUREST = {0.5, 0.0, _MIDDLES[-1]}  # guesses of first tokens and deviations, and of the surest bins
_GUESSED, _OF_RUN, _OF_BINS = 2.0, 6.0, 4.0  # nodes that a guess counts for, and that the run and its bins do in a row
_FADE, _FADE_UNDRAFTED, _FADE_ROW = 0.99, 0.97, 15 / 16  # of the run; of a row in a step without drafts, by a token
_OLD = 4.0  # nodes that count beside those of a try that finds some, as they are old


class _Counts:
    """By kind, how many were accepted, and how many could be; of all nodes of a row, how many ought to be."""

    def __init__(self, num_kinds: int) -> None:
        self.right, self.tried = [0.0] * num_kinds, [0.0] * num_kinds
        self.num_shown = 0  # tokens of the row that the drafter has seen

    def fade(self, factor: float) -> None:
        self.right, self.tried = [factor * n for n in self.right], [factor * n for n in self.tried]

    def add(self, kind: int, right: float, tried: float) -> None:
        self.right[kind] += right
        self.tried[kind] += tried


class DrafterRecord:
    """Learns the chances of a drafter's nodes, each given that its parent is accepted and that no earlier sibling is.

    A node's kind is the bin of its confidence. Its chance is the share of nodes of this kind that were accepted in the
    run, times the factor of its row: the accepted nodes among about the last 16, ÷ those that ought to be.

    Attributes:
        counts, kept: of each row, by request id; `kept` is what it might draft at the last look. `usual`: of a new one.
        firsts, laters: ``[B]`` the worth of the first token of a draft yet to be made; of others, ÷ that before them.
        unseen: ``[B]`` tokens that the drafter has not seen.
        worths: ``[B]`` the probability that each node of a row's draft is accepted, with all on the path to it.
        cost: of drafting, by a constant, tokens of the longest row, all tokens, and tokens that the drafter has to see.
        next_try, is_try: the second of the run from which on it may be tried if drafts pay by now; if a step does so.
        spread: from 0, if drafts are worth what was expected, to 1, if each turns out to be right or wrong.
    """

    def __init__(self) -> None:
        self.cost, self.next_try, self.is_try, self.kept = CostLine([0.01, 0, 1, 1]), 0.0, False, dict[str, int]()
        self.num_drafts = self.usual = 0
        self._run, self.counts = _Counts(len(_GUESSES)), defaultdict[str, _Counts](lambda: _Counts(4))

    def enter(self, request_ids: Seq[str], lengths: Seq[int]) -> None:
        """Work out the chances in the rows of a step, of which each has so many tokens."""
        kinds, shares, off = (self._run.right, self._run.tried, _GUESSES), list[float](), 1.0
        for right, tried, guess in zip(*[part[::-1] for part in kinds], strict=True):
            shares.append((right + _GUESSED * (guess if guess in _SUREST else guess * off)) / (tried + _GUESSED))
            off = shares[-1] / (guess or 1.0)  # as much as the next bin, or later tokens, are taken to be
        self._shares = shares[::-1]
        self._rows = [self.counts[name] for name in request_ids]
        kept, shown = map(self.kept.get, request_ids), [row.num_shown for row in self._rows]
        self._lengths, self.unseen = lengths, [1 if k else n - m for k, n, m in zip(kept, lengths, shown, strict=True)]
        self.spread = min(self._shares[_SPREAD], 1.0)
        first, later = _OF_RUN * self._shares[_FIRST], _OF_RUN * min(self._shares[_LATER], 1.0)
        self.firsts = [(row.right[_FIRST] + first) / (row.tried[_FIRST] + _OF_RUN) for row in self._rows]
        self.laters = [(row.right[_LATER] + later) / (row.tried[_LATER] + _OF_RUN) for row in self._rows]

    def see(self, draft: Draft, request_ids: Seq[str]) -> None:
        """Work out what the nodes of a draft are worth."""
        self._nodes, self.worths = list[list[tuple[int, int]]](), list[list[float]]()
        for index, row in enumerate(map(self.counts.__getitem__, request_ids)):
            factors = [(row.right[kind] + _OF_BINS) / (row.tried[kind] + _OF_BINS) for kind in (2, 3)]
            self._nodes.append(nodes := list[tuple[int, int]]())
            self.worths.append(worths := list[float]())
            left, ranks = [1.0], dict[int, int]()  # by parent: that it is accepted, and none of its children so far is
            for node, parent in enumerate(draft.tree(index), start=draft.indptr[index]):
                rank = ranks.get(parent, 0)
                ranks[parent] = rank + 1
                number = _UNSURE[parent >= 0] ** (rank + 1) if draft.confidence is None else draft.confidence[node]
                kind = bisect_right(_EDGES, number) + (_OTHERS if rank else _BINS)
                worth = left[parent + 1] * min(factors[parent >= 0] * self._shares[kind], 1.0)
                left[parent + 1] -= worth
                left.append(worth)
                nodes.append((parent, kind))
                worths.append(worth)

    def observe(self, outcome: Outcome, stats: StageStats, seconds: float, *, is_prefill: bool = False) -> None:
        """Learn from a step; drafting took `seconds`. Nodes behind the target's choice teach nothing."""
        budget, drafted = stats.budget, stats.drafted
        self.num_drafts += any(budget)
        if any(budget) and any(self.worths):  # to find nothing is quick, and says nothing about what it takes to draft
            self.cost.observe([1, max(budget), sum(budget), sum(compress(self.unseen, budget))], seconds)
        is_news = self.is_try and any(outcome.accepted)
        self._run.fade(_OLD / max(_OLD, *self._run.tried) if is_news else _FADE if any(drafted) else 1.0)
        for index, (row, limit) in enumerate(zip(self._rows, budget, strict=True)):
            path, decided = {-1, *outcome.accepted[index]}, set[int]()
            row.fade(_FADE_ROW ** len(path) if drafted[index] else _FADE_UNDRAFTED)
            row.num_shown = self._lengths[index] if limit else row.num_shown
            if not limit or (is_prefill and not self.worths[index]):  # the KV of a prompt may be yet to come
                continue
            # What drafts are worth that are yet to be made is learnt from this one, also if it has no node.
            worths, expected = self.worths[index], self.firsts[index]
            self._run.add(_SPREAD, (sum(worths[:1]) - expected) ** 2, expected * (1.0 - expected))
            for node, (parent, kind) in enumerate(self._nodes[index]):
                if node >= drafted[index] and parent in path:  # it was not verified, and may be right
                    path.add(node)
                    continue
                worths[node] = float(node in path)
                if parent in path and parent not in decided:
                    self._run.add(kind, worths[node], 1.0)
                    row.add(2 + (parent >= 0), worths[node], self._shares[kind])
                    decided.update([parent] * (node in path))
            for counts in (self._run, row):
                counts.add(_FIRST, sum(worths[:1]), 1.0)
                counts.add(_LATER, sum(worths[1:]), sum(worths[: limit - 1]))
