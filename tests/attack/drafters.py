"""Drafters made to hurt: right, then wrong; at the edges of every rule; and some that break each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from emssd.drafting import Draft, Drafter, Outcome

from .histories import History
from .moods import FORMS, MOODS, Mood, Tree, best_path, right_depths, shallow, tree
from .policies import SHALLOW
from .sins import LATE, OF_TREES, SINS, WHEN_TOLD

_MOST_NODES = 60


class HurtfulDrafter(Drafter):
    """Knows what the target will say, and uses it against the engine, in the ways that a history wants.

    Args:
        history: see `History`; only the first of its drafters sins.
        will_be: ``will_be(request_id)``: the whole right text of a request, past its end.
        vocab_size: of the target.
        at: which of the history's drafters it is.
        foul: ids whose embeddings are not finite.
        faults: see `Watch.faults`.

    Attributes:
        complaints: what it was told or shown and should not have been.
        sins: how often it did what it must not.
        num_moved: how often the accepted nodes of a row were not the first of its tree.
        late: to be called between packing and verification.
    """

    def __init__(
        self,
        history: History,
        will_be: Callable[[str], list[int]],
        vocab_size: int,
        *,
        at: int = 0,
        foul: Seq[int] = (),
        faults: Callable[[str], None] = lambda place: None,
    ) -> None:
        self.how, self.sin = history, "" if at else history.sin
        self.num_speculative_tokens = history.depth
        self.drafts_trees = bool(history.shapes) or self.sin in OF_TREES
        self.max_depth = SHALLOW if history.policy == "shallow" else None
        self.ends = [token for ask in history.asks for token in ask.eos] or [0]
        self.will_be, self.vocab_size, self.foul, self.faults = will_be, vocab_size, foul or (0,), faults
        self.rng = random.Random(history.seed + at)
        self.complaints: list[str] = []
        self.sins = self.num_drafted = self.num_steps = self.num_moved = 0
        self.late: Callable[[], object] = lambda: None
        self.kept: list[Any] = []  # batches and outcomes of before, for those that look back
        self._drafted: dict[str, tuple[int, list[Any]]] = {}  # length of the text; nodes, each with its confidence

    def propose(self, batch: Any, budget: Seq[int]) -> Draft:
        self.num_steps += 1
        self.faults("propose")
        trees = []
        for index, (row, room) in enumerate(zip(batch, budget, strict=True)):
            right = self.will_be(row.request_id)
            if list(row.tokens) != right[: len(row.tokens)]:
                self.complaints.append(f"was shown {list(row.tokens)} of {row.request_id}, which goes {right}")
            mood = MOODS[self._mood(index, row.request_id)]
            room = min(max(room, 0), _MOST_NODES)  # one that wants ever more is given thousands
            trees.append(self._tree(mood, right[len(row.tokens) :], room, row.num_remaining - 1))
            sure = [self.rng.choice((0.0, 1.0, self.rng.random())) if self.how.sure else None for _ in trees[-1]]
            self._drafted[row.request_id] = (
                len(row.tokens),
                [(*node, how) for node, how in zip(trees[-1], sure, strict=True)],
            )
        draft = self._draft(batch, trees)
        self.num_drafted += draft.token_ids.numel()
        if self.sin and self.rng.random() < self.how.chance:
            draft = self._sin(batch, budget, draft)
        self.kept = [*self.kept[-3:], batch]
        return draft

    def _tree(self, mood: Mood, coming: list[int], room: int, deepest: int) -> Tree:
        if not self.how.shapes:
            return [(token, node - 1) for node, token in enumerate(mood(coming, room, self, self.rng)[:room])]
        longest = min(room, max(deepest, 0))
        length = self.rng.randint(min(1, longest), longest)
        path = mood(coming, length, self, self.rng)[:length]
        return tree(self.rng.choice(self.how.shapes), path, room, deepest, self, self.rng)

    def _draft(self, batch: Any, trees: list[Tree]) -> Draft:
        draft = Draft.from_trees(trees)
        if draft.is_chain and (not self.how.shapes or self.rng.random() < 0.5):
            draft = replace(draft, parents=None)
        sure = [how for row in batch for *_, how in self._drafted[row.request_id][1]] if self.how.sure else None
        ids = FORMS[self.how.form](draft.token_ids.tolist())
        return replace(draft, token_ids=ids, confidence=None if sure is None else tuple(sure))

    def observe(self, outcome: Outcome) -> None:
        if not self.sins:  # one that has sinned may have been switched off in between, or spoilt what it reads here
            for index, row in enumerate(outcome.batch):
                if row.request_id in self._drafted:  # one that drafts nothing is not asked
                    self._hear(row.request_id, index, outcome)
                self._drafted[row.request_id] = len(row.tokens), []  # until it is asked again
        self.faults("observe")
        self._when_told("observe", outcome.batch)

    def _hear(self, request_id: str, index: int, outcome: Outcome) -> None:
        """Compare an outcome of a row with its draft, and with the text that comes."""
        draft = outcome.draft
        start, stop = draft.indptr[index : index + 2]
        length, made = self._drafted[request_id]
        made = made if self.max_depth is None else shallow(made, self.max_depth)
        coming = self.will_be(request_id)[length:]
        parents = range(-1, stop - start - 1) if draft.parents is None else draft.parents[start:stop]
        sure = [None] * (stop - start) if draft.confidence is None else draft.confidence[start:stop]
        drafted = list(zip(draft.token_ids[start:stop].tolist(), parents, sure, strict=True))
        if drafted != made[: len(drafted)]:
            self.complaints.append(f"heard that it drafted {drafted} for {request_id}, where it had {made}")
        depths, accepted = right_depths(drafted, coming), list(outcome.accepted[index])
        self.num_moved += accepted != list(range(len(accepted)))
        if accepted != best_path(drafted, depths):
            self.complaints.append(
                f"of {request_id} {drafted} was drafted where {coming} comes, and {accepted} accepted"
            )
        for at, (depth, token) in enumerate(zip([0, *depths], outcome.target_ids[index], strict=True)):
            if (depth or not at) and depth < len(coming) and token != coming[depth]:
                self.complaints.append(
                    f"heard of {token} behind {depth} right nodes of {request_id}, where {coming} comes"
                )

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._drafted.pop(request_id, None)
        self.faults("release")
        self._when_told("release", ())

    def _mood(self, index: int, request_id: str) -> str:
        chance = self.rng.randrange(len(self.how.moods))
        kinds = {"chance": chance, "row": index, "id": sum(request_id.encode()), "step": self.num_steps}
        return self.how.moods[kinds[self.how.manner] % len(self.how.moods)]

    def _sin(self, batch: Any, budget: Seq[int], draft: Draft) -> Draft:
        if self.sin in SINS and len(batch):
            self.sins += 1
            return SINS[self.sin](self, batch, draft, budget)
        if self.sin in LATE and len(batch):
            self.sins += 1
            ids = torch.tensor(draft.token_ids.tolist(), dtype=torch.int64)
            lists: list[Any] = [field and list(field) for field in (draft.indptr, draft.parents, draft.confidence)]
            draft = Draft(ids, *lists)  # a list can be changed
            self.late = lambda: LATE[self.sin](self, batch, draft)
        return draft

    def _when_told(self, what: str, batch: Any) -> None:
        when, sin = WHEN_TOLD.get(self.sin, ("", None))
        if when == what and sin is not None and self.rng.random() < self.how.chance:
            self.sins += 1
            sin(self, batch)
