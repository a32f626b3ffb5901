"""Drafters in turn: each drafts for the rows that those before it had nothing for, within the budget policy's limits.

Retrieval costs nothing and is good on text to copy, a model fills the gaps: the draft is ragged by construction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from itertools import accumulate
from operator import index
from typing import Any, TypeVar

import torch

from emssd.attention.transfer import on_device
from emssd.drafting.budget import BudgetPolicy, BudgetStep, DraftedNode
from emssd.drafting.checked import CheckedDrafter
from emssd.drafting.draft import Draft, Outcome
from emssd.errors import PluginError
from emssd.faults import guarded
from emssd.metrics.stats import StageStats, StepStats
from emssd.metrics.timing import phase
from emssd.sequences import Batch

__all__ = ["DraftStages"]

_T = TypeVar("_T")
_MOST_NODES = 4096  # of a row's tree, whatever a drafter asks for: policies look at each of them


class DraftStages:
    """One drafter or several, the first to be asked first.

    Args:
        drafters: at least one.
        policy: decides before each drafter what it may draft, and afterwards what of it is verified.
        policy_name: how messages call the plugin that it comes from.
    """

    def __init__(self, drafters: Seq[CheckedDrafter], policy: BudgetPolicy, policy_name: str | None = None) -> None:
        self.drafters = tuple(drafters)
        self._policy_name = f"budget policy {policy_name or type(policy).__name__}"
        self.policy = policy
        self._step: BudgetStep | None = None  # that is being drafted for
        self._failed: PluginError | None = None  # of the policy, while a drafter asked it
        self.stats: tuple[StageStats, ...] = ()  # of the latest step

    @property
    def policy(self) -> BudgetPolicy:
        """What decides before each drafter, between its passes, and afterwards."""
        return self._policy

    @policy.setter
    def policy(self, policy: BudgetPolicy) -> None:
        self._policy = policy
        ends = getattr(policy.goes_on, "__func__", None) is not BudgetPolicy.goes_on
        for drafter in self.drafters:
            drafter.end_by(self._going_on if ends else None)

    @property
    def num_speculative_tokens(self) -> int:
        """The most tokens that any of the drafters proposes for one row in one step."""
        return max(drafter.num_speculative_tokens for drafter in self.drafters)

    @property
    def drafts_trees(self) -> bool:
        """Whether any of the drafters may draft trees."""
        return any(drafter.drafts_trees for drafter in self.drafters)

    @property
    def num_candidates(self) -> int:
        """The most candidates that any of the drafters wants to hear of."""
        return max(drafter.num_candidates for drafter in self.drafters)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """All hidden states that any of the drafters wants to hear of."""
        return tuple(sorted({layer for drafter in self.drafters for layer in drafter.hidden_layers}))

    def propose(self, batch: Batch, limits: Seq[int], num_prefill_tokens: int) -> Draft:
        """Draft for every row of `batch`, each up to its limit ``[B]``, and keep what the policy wants verified."""
        still, num_other, parts, stats = list(limits), num_prefill_tokens, list[Draft](), list[StageStats]()
        for stage, drafter in enumerate(self.drafters):
            with phase("schedule"):
                self._failed = None
                step = self._step = BudgetStep(batch, _limits(drafter, batch, still), num_other, stage)
                budget = self._asked(self.policy.allot, step.limits, step)
                depth = self._called(lambda: self.policy.max_depth, "max_depth")
            with phase("draft"):
                start = time.perf_counter()
                proposed = drafter.propose(batch, budget)
                seconds = time.perf_counter() - start
                if (failed := self._failed) is not None:
                    raise failed
            with phase("schedule"):
                if depth is not None:
                    proposed = proposed.shallow([depth] * len(batch))
                lengths = self._asked(self.policy.trim, proposed.lengths, step, proposed)
                part = proposed.cut(_untrimmed(proposed, lengths))
            parts.append(part)
            stats.append(StageStats(tuple(budget), tuple(part.lengths), seconds))
            num_other += part.indptr[-1]
            still = [0 if length else limit for limit, length in zip(still, part.lengths, strict=True)]
        self.stats = tuple(stats)
        return _joined(parts, len(batch))

    def check_ids(self, draft: Draft, drafted: Seq[int]) -> None:
        """Check the ids of `draft`, ``[num_draft]``, now that they are on the host: each drafter its own."""
        for drafter, stats in zip(self.drafters, self.stats, strict=True):
            rows = zip(draft.indptr, draft.indptr[1:], stats.drafted, strict=False)
            drafter.check_ids([token for start, stop, own in rows if own for token in drafted[start:stop]])

    @phase("schedule")
    def _going_on(self, newest: Mapping[str, Seq[DraftedNode]]) -> set[str]:
        """See `GoesOn`. If the policy fails, no row goes on, and the step fails once the drafter is done."""
        step = self._step
        assert step is not None, "a drafter asks while it drafts"
        names = step.batch.request_ids
        try:
            answers = self._asked(self.policy.goes_on, [1] * len(names), step, [newest.get(name, ()) for name in names])
        except PluginError as error:
            self._failed, answers = error, []
        return {name for name, answer in zip(names, answers, strict=False) if answer}

    def _asked(self, decide: Callable[..., Seq[int]], limits: Seq[int], *arguments: Any) -> list[int]:
        """What the policy decides in `decide`.

        Raises:
            PluginError: it fails, or gives anything else than one number in ``0..limits[row]`` for each row.
        """
        lengths = self._called(lambda *given: [index(length) for length in decide(*given)], decide.__name__, *arguments)
        if len(lengths) != len(limits) or any(
            not 0 <= length <= limit for length, limit in zip(lengths, limits, strict=True)
        ):
            raise PluginError(
                f"{self._policy_name} broke its interface: {decide.__name__} gave {lengths}, "
                f"and the limits of the rows are {list(limits)}; give one number for each row, from 0 to its limit"
            )
        return lengths

    def _called(self, method: Callable[..., _T], name: str, *arguments: Any) -> _T:
        """Call the policy.

        Raises:
            PluginError: it fails.
        """
        with guarded(self._policy_name, name, in_step=True):
            return method(*arguments)

    def observe(self, outcome: Outcome) -> None:
        """Tell each drafter what became of its own rows, and that nothing was drafted for the others.

        Each is told, also if one before it fails.
        """
        if len(self.drafters) == 1:
            self.drafters[0].observe(outcome)
            return
        with ExitStack() as everybody:
            for drafter, stats in reversed(list(zip(self.drafters, self.stats, strict=True))):
                own = _own(outcome, stats.drafted)
                everybody.callback(drafter.observe, own)

    def learn(self, outcome: Outcome, stats: StepStats) -> None:
        """Tell the policy what a step did, and how long it took."""
        self._called(self.policy.observe, "observe", outcome, stats)

    def release(self, request_ids: Iterable[str]) -> None:
        """Tell the policy and all drafters that these requests are gone; each is told, also if one before it fails."""
        request_ids = list(request_ids)
        with ExitStack() as everybody:
            everybody.callback(self._called, self.policy.release, "release", request_ids)
            for drafter in reversed(self.drafters):
                everybody.callback(drafter.release, request_ids)

    def reset(self) -> None:
        """Tell all drafters to drop what they have learnt across requests."""
        for drafter in self.drafters:
            drafter.reset()


def _limits(drafter: CheckedDrafter, batch: Batch, still: Seq[int]) -> tuple[int, ...]:
    """``[B]`` the most that `drafter` can draft for each row: a chain ends before the row does."""
    most = drafter.num_speculative_tokens
    if drafter.drafts_trees:
        return tuple(min(limit, most, _MOST_NODES) for limit in still)
    return tuple([min(limit, most, max(0, row.num_remaining - 1)) for row, limit in zip(batch, still, strict=True)])


def _untrimmed(draft: Draft, lengths: Seq[int]) -> Seq[int]:
    """What of each row to verify if the policy wants ``lengths [B]``: rows with a `q` are left whole.

    Otherwise tokens would be dropped by what they are, or by what followed them; see `emssd.sampling.residual`.
    """
    if draft.q is None:
        return lengths
    rows = zip(draft.q, draft.lengths, lengths, strict=True)
    return [length if q is None else whole for q, whole, length in rows]


def _own(outcome: Outcome, drafted: Seq[int]) -> Outcome:
    """What became of the drafts of one drafter, which drafted ``drafted [B]``: nothing for rows of others."""
    accepted = tuple(nodes if length else () for nodes, length in zip(outcome.accepted, drafted, strict=True))
    targets = tuple(ids[: length + 1] for ids, length in zip(outcome.target_ids, drafted, strict=True))
    candidates = outcome.candidates
    if candidates is not None:
        candidates = tuple(ids[: length + 1] for ids, length in zip(candidates, drafted, strict=True))
    return Outcome(outcome.batch, outcome.draft.cut(drafted), accepted, targets, candidates, outcome.hidden)


def _joined(parts: list[Draft], num_rows: int) -> Draft:
    """One draft of several; each row has tokens in at most one of them."""
    filled = [part for part in parts if part.token_ids.numel()]
    if len(filled) < 2:
        return filled[0] if filled else Draft.empty(num_rows)
    device = next((part.token_ids.device for part in filled if part.token_ids.device.type != "cpu"), None)
    offsets = [0, *accumulate(part.token_ids.numel() for part in filled)]
    nodes, indptr, parents, confidence = list[int](), [0], list[int](), list[float]()
    q: list[Seq[torch.Tensor] | None] = [None] * num_rows
    for row in range(num_rows):
        for part, offset in zip(filled, offsets, strict=False):
            start, stop = part.indptr[row], part.indptr[row + 1]
            nodes.extend(range(offset + start, offset + stop))
            parents.extend(part.tree(row))
            if start < stop and part.q is not None:
                q[row] = part.q[row]
            confidence.extend(part.confidence[start:stop] if part.confidence is not None else ())
        indptr.append(len(nodes))
    together = torch.cat([part.token_ids.to(device or "cpu", non_blocking=True) for part in filled])
    return Draft(
        together[on_device(nodes, together.device)],
        tuple(indptr),
        None if all(part.parents is None for part in filled) else tuple(parents),
        tuple(confidence) if len(confidence) == len(nodes) else None,
        tuple(q) if any(each is not None for each in q) else None,
    )
