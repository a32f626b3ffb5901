"""Drafters in turn: each drafts for rows without a draft from an earlier one, within the budget policy's limits.

Retrieval costs nothing and is good on text to copy, a model fills the gaps: the draft is ragged by construction.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter, gt, index
from typing import Any

import torch

from emssd.attention.packed import on_device
from emssd.drafting.budget import BudgetPolicy, BudgetStep, DraftedNode
from emssd.drafting.checked import CheckedDrafter
from emssd.drafting.draft import Draft, DraftExtra, Outcome
from emssd.drafting.drafter import Drafter
from emssd.errors import PluginError
from emssd.errors.faults import blame
from emssd.metrics.stats import StageStats, StepStats
from emssd.sequences import Batch

__all__ = ["DraftStages", "ForcedTokens"]

_MOST_NODES = 4096  # of a row's tree, whatever a drafter asks for: policies look at each of them


class ForcedTokens(Drafter):
    """Drafts what the grammar of a row forces, and nothing for other rows: the stages after it draft for these."""

    label, num_speculative_tokens = "grammar", 16

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        rows = zip(batch, budget, strict=True)
        return Draft.from_chains([[] if row.grammar is None else row.grammar.forced(limit) for row, limit in rows])


class DraftStages:
    """One drafter or several, the first to be asked first. The policy decides before each drafter, and afterwards."""

    def __init__(self, drafters: Seq[CheckedDrafter], policy: BudgetPolicy, policy_name: str | None = None) -> None:
        self.drafters = tuple(drafters)
        self.drafts_trees = any(drafter.drafts_trees for drafter in drafters)
        self._policy_name = f"budget policy {policy_name or type(policy).__name__}"
        self.policy = policy
        self._most: list[int] = []  # of each drafter, once asked for in this step
        self._step: BudgetStep | None = None  # that is being drafted for
        self._failed: PluginError | None = None  # of the policy, while a drafter asked it
        self.stats: tuple[StageStats, ...] = ()  # of the latest step
        self.seconds = 0.0  # inside the drafters' `propose` in it

    def force_tokens(self, vocab_size: int) -> None:
        """From now on, draft the tokens that grammars force, in front of all others. Called between steps."""
        if not any(isinstance(drafter.drafter, ForcedTokens) for drafter in self.drafters):
            self._most = []
            self.drafters = (CheckedDrafter(ForcedTokens(), "of forced tokens", vocab_size), *self.drafters)

    @property
    def policy(self) -> BudgetPolicy:
        """The budget policy: it decides before each drafter, between its passes, and afterwards."""
        return self._policy

    @policy.setter
    def policy(self, policy: BudgetPolicy) -> None:
        self._policy = policy
        self._trims = getattr(policy.trim, "__func__", None) is not BudgetPolicy.trim
        ends = getattr(policy.goes_on, "__func__", None) is not BudgetPolicy.goes_on
        for drafter in self.drafters:
            drafter.end_by(self._going_on if ends else None)

    @property
    def summary(self) -> str:
        """In a line, the tokens that drafters drafted, the share that was accepted, and the summary of the policy."""
        parts = [
            f"{drafter.drafter.label} drafted {drafter.num_drafted} tokens "
            f"({drafter.num_accepted / drafter.num_drafted:.0%} right)"
            for drafter in self.drafters
            if drafter.num_drafted
        ]
        with suppress(PluginError):
            if parts and (summary := self._of_policy("summary")):
                parts.append(summary)
        return "; ".join(parts)

    @property
    def num_speculative_tokens(self) -> int:
        """The most tokens that any of the drafters proposes for one row in one step."""
        self._most = list(map(attrgetter("num_speculative_tokens"), self.drafters))
        return max(self._most)

    @property
    def num_candidates(self) -> int:
        """The most candidates that any of the drafters wants."""
        return int(max(map(attrgetter("num_candidates"), self.drafters)))

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """All hidden states that any of the drafters wants."""
        return tuple(sorted({layer for drafter in self.drafters for layer in drafter.hidden_layers}))

    def propose(self, batch: Batch, limits: Seq[int], num_prefill_tokens: int) -> Draft:
        """Draft for every row of `batch`, each up to its limit ``[B]``, and keep what the policy wants verified."""
        still, num_other, parts, stats = list(limits), num_prefill_tokens, [], []
        self.seconds, num_rows = 0.0, len(batch.rows)
        every = self._most or [drafter.num_speculative_tokens for drafter in self.drafters]
        self._most, self._step = [], None
        if not any(every) or self._pauses():  # neither drafters nor the policy are asked
            self.stats = (StageStats((0,) * num_rows, (0,) * num_rows, 0.0),) * len(every)
            return Draft.empty(num_rows)
        for stage, (drafter, most) in enumerate(zip(self.drafters, every, strict=True)):
            self._failed = None
            step = self._step = BudgetStep(batch, self._limits(drafter, most, batch, still), num_other, stage)
            is_forced = isinstance(drafter.drafter, ForcedTokens)  # each is accepted, so it saves a step
            budget = self._asked("allot", step.limits, step)
            budget = list(step.limits) if is_forced else budget
            if not any(budget):  # the drafter is not asked
                parts.append(Draft.empty(num_rows))
                stats.append(StageStats((0,) * num_rows, (0,) * num_rows, 0.0))
                continue
            depth = self._of_policy("max_depth")
            start = time.perf_counter()
            proposed = drafter.propose(batch, budget)
            seconds = time.perf_counter() - start
            if (failed := self._failed) is not None:
                raise failed
            proposed = _allowed(proposed, batch, drafter)
            if depth is not None and not is_forced:
                proposed = proposed.shallow([depth] * num_rows)
            drafted = proposed.lengths
            lengths = self._asked("trim", drafted, step, proposed) if self._trims else drafted
            if is_forced:
                lengths = drafted
            elif lengths != drafted:
                lengths = list(_untrimmed(proposed, lengths))
                proposed = proposed.cut(lengths)
            parts.append(proposed)
            self.seconds += seconds
            stats.append(StageStats(tuple(budget), tuple(lengths), seconds))
            num_other += proposed.indptr[-1]
            still = [0 if length else limit for limit, length in zip(still, lengths, strict=True)]
        self.stats = tuple(stats)
        return parts[0] if len(parts) == 1 else _joined(parts, num_rows)

    def _pauses(self) -> bool:
        """Whether the policy lets this step pass. What a grammar forces is drafted in any case."""
        try:
            pauses = self._policy.pause > 0 and not isinstance(self.drafters[0].drafter, ForcedTokens)
            self._policy.pause -= pauses
        except BaseException as error:
            blame(self._policy_name, "pause", error)
        return pauses

    def _limits(self, drafter: CheckedDrafter, most: int, batch: Batch, limits: Seq[int]) -> tuple[int, ...]:
        """``[B]`` the most that `drafter` can draft for each row; also beside trees, a chain ends before its row."""
        if drafter.drafts_trees:
            most = min(most, _MOST_NODES)
        elif self.drafts_trees:
            limits = [max(0, min(limit, row.num_remaining - 1)) for row, limit in zip(batch.rows, limits, strict=True)]
        return tuple([limit if limit < most else most for limit in limits])

    def check_ids(self, drafted: Seq[Seq[int]]) -> None:
        """Check the ids ``[B]`` of each row's draft, now that they are on the host: each drafter its own."""
        for drafter, stats in zip(self.drafters, self.stats, strict=True):
            rows = zip(drafted, stats.drafted, strict=True)
            drafter.check_ids([token for tokens, number in rows if number for token in tokens])

    def _going_on(self, newest: Mapping[str, Seq[DraftedNode]]) -> set[str]:
        """See `GoesOn`. If the policy fails, no row goes on, and the step fails once the drafter is done."""
        step = self._step
        assert step is not None, "a drafter asks while it drafts"
        names = step.batch.request_ids
        try:
            answers = self._asked("goes_on", [1] * len(names), step, [newest.get(name, ()) for name in names])
        except PluginError as error:
            self._failed, answers = error, []
        return {name for name, answer in zip(names, answers, strict=False) if answer}

    def _asked(self, method: str, limits: Seq[int], *arguments: Any) -> list[int]:
        """The decision of a `method` of the policy. Raises PluginError: it fails, or gives anything else than one
        number in ``0..limits[row]`` for each row.
        """
        try:
            lengths = list(map(index, getattr(self._policy, method)(*arguments)))
        except BaseException as error:
            blame(self._policy_name, method, error)
        if len(lengths) != len(limits) or min(lengths, default=0) < 0 or any(map(gt, lengths, limits)):
            raise PluginError(
                f"{self._policy_name} broke its interface: {method} gave {lengths}, "
                f"and the limits of the rows are {list(limits)}; give one number for each row, from 0 to its limit"
            )
        return lengths

    def _of_policy(self, name: str, *arguments: Any) -> Any:
        """An attribute of the policy, or the result of that method. Raises PluginError: the policy fails."""
        try:
            value = getattr(self._policy, name)
            return value(*arguments) if arguments else value
        except BaseException as error:
            blame(self._policy_name, name, error)

    def observe(self, outcome: Outcome) -> None:
        """Notify each drafter of the outcome of its own rows, as if nothing was drafted for the others.

        Each is notified, also if one before it fails.
        """
        if len(self.drafters) == 1:
            self.drafters[0].observe(outcome)
            return
        with ExitStack() as everybody:
            for drafter, stats in reversed(list(zip(self.drafters, self.stats, strict=True))):
                everybody.callback(drafter.observe, _of_one(outcome, stats.drafted))

    def learn(self, outcome: Outcome, stats: StepStats) -> None:
        """Notify the policy of a step for which it was asked, and of how long it took."""
        if self._step is not None:
            self._of_policy("observe", outcome, stats)

    def release(self, request_ids: Iterable[str]) -> None:
        """Notify all drafters and the policy that these requests are gone, also if one before it fails."""
        request_ids = list(request_ids)
        with ExitStack() as everybody:
            everybody.callback(self._of_policy, "release", request_ids)
            for drafter in reversed(self.drafters):
                everybody.callback(drafter.release, request_ids)

    def reset(self) -> None:
        """Reset all drafters."""
        for drafter in self.drafters:
            drafter.reset()


def _allowed(draft: Draft, batch: Batch, drafter: CheckedDrafter) -> Draft:
    """The nodes of `draft` that the grammars of their rows allow, each with all on its path; its ids are on the host.

    Rows with an `extra` stay as they are, as in `_untrimmed`: the target never accepts what is not allowed.
    """
    if not draft.indptr[-1] or not any(map(attrgetter("grammar"), batch.rows)):
        return draft
    if not draft.on_host:
        draft = replace(draft, token_ids=draft.token_ids.cpu())
        drafter.check_ids(draft.token_ids.tolist())
        if drafter.failure is not None:
            return Draft.empty(len(batch))
    allowed = list[Seq[int]]()
    for number, (row, length) in enumerate(zip(batch, draft.lengths, strict=True)):
        if row.grammar is None or (draft.extra is not None and draft.extra[number] is not None):
            allowed.append(range(length))
            continue
        states = {-1: row.grammar}
        for node, (token, parent) in enumerate(zip(draft.tokens(number), draft.tree(number), strict=True)):
            if parent in states and (following := states[parent].after(token)) is not None:
                states[node] = following
        allowed.append([node for node in states if node >= 0])
    return draft.pick(allowed)


def _untrimmed(draft: Draft, lengths: Seq[int]) -> Seq[int]:
    """The number of tokens to verify of each row, if the policy wants ``lengths [B]``; see `Draft.extra`."""
    if draft.extra is None:
        return lengths
    rows = zip(draft.extra, draft.lengths, lengths, strict=True)
    return [length if extra is None else whole for extra, whole, length in rows]


def _of_one(outcome: Outcome, drafted: Seq[int]) -> Outcome:
    """The outcome for one drafter, with ``drafted [B]`` tokens of its own: other rows have no draft."""
    accepted = tuple(nodes if length else () for nodes, length in zip(outcome.accepted, drafted, strict=True))
    targets = tuple(ids[: length + 1] for ids, length in zip(outcome.target_ids, drafted, strict=True))
    candidates = outcome.candidates
    if candidates is not None:
        candidates = tuple(ids[: length + 1] for ids, length in zip(candidates, drafted, strict=True))
    return Outcome(outcome.batch, outcome.draft.cut(drafted), accepted, targets, candidates, outcome.hidden)


def _joined(parts: list[Draft], num_rows: int) -> Draft:
    filled = [part for part in parts if part.token_ids.numel()]
    if len(filled) < 2:
        return filled[0] if filled else Draft.empty(num_rows)
    device = next((part.token_ids.device for part in filled if part.token_ids.device.type != "cpu"), None)
    offsets = [0, *accumulate(part.token_ids.numel() for part in filled)]
    nodes, indptr, parents, confidence = list[int](), [0], list[int](), list[float]()
    extra: list[DraftExtra | None] = [None] * num_rows
    for row in range(num_rows):
        for part, offset in zip(filled, offsets, strict=False):
            start, stop = part.indptr[row], part.indptr[row + 1]
            nodes.extend(range(offset + start, offset + stop))
            parents.extend(part.tree(row))
            if start < stop and part.extra is not None:
                extra[row] = part.extra[row]
            confidence.extend(part.confidence[start:stop] if part.confidence is not None else ())
        indptr.append(len(nodes))
    together = torch.cat([part.token_ids.to(device or "cpu", non_blocking=True) for part in filled])
    return Draft(
        together[on_device(nodes, together.device)],
        tuple(indptr),
        None if all(part.parents is None for part in filled) else tuple(parents),
        tuple(confidence) if len(confidence) == len(nodes) else None,
        tuple(extra) if any(claims is not None for claims in extra) else None,
    )
