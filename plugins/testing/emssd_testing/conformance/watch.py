"""A drafter under observation: the rules of the interface are tested in every call, and drafts are counted."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import torch

from emssd.attention.trees import is_chain
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, Drafter, Outcome
from emssd.drafting.draft import check_ids
from emssd.model import BorrowedTarget
from emssd.sequences import Batch, Row
from emssd_testing.conformance.rules import broken, named
from emssd_testing.conformance.scripted import Decision, ScriptedEngine, World

__all__ = ["DrafterWorld", "WatchedDrafter", "nodes_of", "reading", "shown"]

Nodes = list[tuple[int, int]]
"""A row's draft: of each node the token id and the parent."""

_FIELDS = [field.name.removeprefix("_") for field in dataclasses.fields(Row)]


class WatchedDrafter(Drafter):
    """Passes every call on to another drafter.

    Attributes:
        num_drafted, num_accepted: tokens by request id, as the outcomes say.
        seconds, num_tokens: spent in `propose`, and proposed by it.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.drafts_trees, self.num_candidates = drafter.drafts_trees, drafter.num_candidates
        self.hidden_layers = drafter.hidden_layers
        self.num_drafted: Counter[str] = Counter()
        self.num_accepted: Counter[str] = Counter()
        self.seconds = 0.0
        self.num_tokens = 0
        self._vocab_size = vocab_size
        self._rows: dict[str, Row] = {}

    @property
    def num_speculative_tokens(self) -> int:  # type: ignore[override]  # asked of the watched drafter at any time
        """The most tokens it proposes for one row in one step."""
        return self.drafter.num_speculative_tokens

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._rows = {row.request_id: row for row in batch}
        limits = list(budget)
        with reading("drafter", f"propose with a budget of {limits}", batch):
            start = time.perf_counter()
            draft = self.drafter.propose(batch, budget)
            self.seconds += time.perf_counter() - start
        with named("drafter.draft", "reading the draft"):
            draft.check(batch, limits, self._vocab_size, trees=self.drafts_trees)
            check_ids(draft.token_ids.tolist(), self._vocab_size)
        self.num_tokens += draft.token_ids.numel()
        return draft

    def observe(self, outcome: Outcome) -> None:
        verified = nodes_of(outcome.batch, outcome.draft)
        for name, accepted in zip(outcome.batch.request_ids, outcome.accepted, strict=True):
            self.num_drafted[name] += len(verified[name])
            self.num_accepted[name] += len(accepted)
        states = outcome.hidden.states if outcome.hidden is not None else ()
        copies = [tensor.clone() for tensor in states]
        with reading("drafter", f"observe of {list(map(len, outcome.accepted))} accepted tokens", outcome.batch):
            self.drafter.observe(outcome)
        if not all(map(torch.equal, states, copies)):
            broken("drafter.accounting", "observe wrote to hidden states of the target, which others read too")
        if (after := nodes_of(outcome.batch, outcome.draft)) != verified:
            one, other = ({name: shown(nodes) for name, nodes in rows.items()} for rows in (verified, after))
            broken("drafter.accounting", f"observe changed the draft that was verified from {one} to {other}")

    def release(self, request_ids: Iterable[str]) -> None:
        names = list(request_ids)
        with reading("drafter", f"release of {names}", Batch(tuple(self._rows.values()))):
            self.drafter.release(names)
        for name in names:
            self._rows.pop(name, None)


def nodes_of(batch: Batch, draft: Draft) -> dict[str, Nodes]:
    """By request id the nodes that were drafted."""
    tokens, rows = draft.token_ids.tolist(), zip(draft.indptr, draft.indptr[1:], strict=False)
    trees = map(draft.tree, range(len(batch)))
    drafts = [list(zip(tokens[start:stop], tree, strict=True)) for (start, stop), tree in zip(rows, trees, strict=True)]
    return dict(zip(batch.request_ids, drafts, strict=True))


def shown(nodes: Nodes) -> list[Any]:
    """Nodes for a message: of a chain its token ids alone."""
    return [token for token, _ in nodes] if is_chain([parent for _, parent in nodes]) else nodes


@contextmanager
def reading(kind: str, what: str, batch: Batch, draft: Draft | None = None) -> Iterator[None]:
    """A call of a plugin, which is not to raise, and changes nothing of `batch` and of the ids of `draft`."""
    rows = [{name: getattr(row, name) for name in _FIELDS} | {"tokens": list(row.tokens)} for row in batch]
    ids, where = [] if draft is None else draft.token_ids.tolist(), what.partition(" ")[0]
    with named(f"{kind}.raises", what):
        yield
    for row, values in zip(batch, rows, strict=True):
        for name, value in values.items():
            if (now := getattr(row, name)) != value:
                name_of_row = values["request"].request_id
                broken(f"{kind}.batch", f"{where} changed {name} of request {name_of_row!r} from {value} to {now}")
    if draft is not None and (after := draft.token_ids.tolist()) != ids:
        broken(f"{kind}.batch", f"{where} changed the drafted tokens from {ids} to {after}")


class DrafterWorld(World):
    """A drafter, or several in turn, and by request id the `drafts` of all steps, before they were trimmed."""

    kind = "drafter"

    def __init__(self, watched: list[WatchedDrafter], vocab_size: int, target: BorrowedTarget | None = None) -> None:
        self.watched, policy = watched, _KeepScripted()
        super().__init__(ScriptedEngine(watched, policy, vocab_size, target=target))
        self.drafts, policy.decisions = policy.drafts, self.engine.decisions

    def propose(self, rows: Seq[Row], decisions: Seq[Decision]) -> Draft:
        """The first half of a step."""
        with named("drafter.raises", "a step"):
            return self.engine.drafting.propose(Batch(tuple(rows)), self.engine.tell(rows, decisions), 0)


class _KeepScripted(BudgetPolicy):
    """Allots what is possible, trims as the script says, and remembers what was drafted."""

    decisions: Mapping[str, Decision]

    def __init__(self) -> None:
        self.drafts: dict[str, list[Nodes]] = {}

    def allot(self, step: BudgetStep) -> Seq[int]:
        return step.limits

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        for name, nodes in nodes_of(step.batch, draft).items():
            self.drafts.setdefault(name, []).append(nodes)
        keep = [self.decisions[name].keep for name in step.batch.request_ids]
        return [min(length, most) for length, most in zip(draft.lengths, keep, strict=True)]
