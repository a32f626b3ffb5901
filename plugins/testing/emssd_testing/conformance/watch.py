"""Plugins under observation: the rules of their interface are tested in every call."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch

from emssd.attention import AttentionBackend, Kept, KVCacheSpec, KVUsage, PackedInputs, StepPlan
from emssd.attention.trees import is_chain
from emssd.drafting import BudgetPolicy, BudgetStep, Draft, DraftedNode, Drafter, Outcome, StepStats
from emssd.drafting.draft import check_ids
from emssd.sequences import Batch, Row
from emssd_testing.conformance.rules import BrokenRule, broken, named

__all__ = [
    "Decided",
    "Nodes",
    "WatchedBackend",
    "WatchedDrafter",
    "WatchedPolicy",
    "check_plan",
    "nodes_of",
    "places_of",
    "shown",
]

Nodes = list[tuple[int, int]]
"""A row's draft: of each node the token id and the parent."""

_FIELDS = [field.name.removeprefix("_") for field in dataclasses.fields(Row)]


class WatchedDrafter(Drafter):
    """Passes every call on to another drafter.

    Attributes:
        num_drafted, num_accepted: tokens, as the outcomes say.
        seconds, num_tokens: spent in `propose`, and proposed by it.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.drafts_trees, self.num_candidates = drafter.drafts_trees, drafter.num_candidates
        self.hidden_layers = drafter.hidden_layers
        self.num_drafted = self.num_accepted = self.num_tokens = 0
        self.seconds = 0.0
        self._vocab_size = vocab_size
        self._rows: dict[str, Row] = {}

    @property
    def num_speculative_tokens(self) -> int:  # type: ignore[override]  # asked of the watched drafter at any time
        return self.drafter.num_speculative_tokens

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        self._rows = {row.request_id: row for row in batch}
        limits = list(budget)
        with _reading("drafter", f"propose with a budget of {limits}", batch):
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
        self.num_drafted += sum(map(len, verified.values()))
        self.num_accepted += sum(map(len, outcome.accepted))
        states = outcome.hidden.states if outcome.hidden is not None else ()
        copies = [tensor.clone() for tensor in states]
        with _reading("drafter", f"observe of {list(map(len, outcome.accepted))} accepted tokens", outcome.batch):
            self.drafter.observe(outcome)
        if not all(map(torch.equal, states, copies)):
            broken("drafter.accounting", "observe wrote to hidden states of the target, which others read too")
        if (after := nodes_of(outcome.batch, outcome.draft)) != verified:
            one, other = ({name: shown(nodes) for name, nodes in rows.items()} for rows in (verified, after))
            broken("drafter.accounting", f"observe changed the draft that was verified from {one} to {other}")

    def release(self, request_ids: Iterable[str]) -> None:
        names = list(request_ids)
        with _reading("drafter", f"release of {names}", Batch(tuple(self._rows.values()))):
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
def _reading(kind: str, what: str, batch: Batch, draft: Draft | None = None) -> Iterator[None]:
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


Decided = tuple[str, tuple[int, ...]]
"""The method, and what it said of each row."""


class WatchedPolicy(BudgetPolicy):
    """Passes every call on to another policy, and remembers in `decisions` what it decided."""

    def __init__(self, policy: BudgetPolicy) -> None:
        self.policy = policy
        self.decisions: list[Decided] = []
        self.max_depth = policy.max_depth

    @property
    def pause(self) -> int:
        return self.policy.pause

    @pause.setter
    def pause(self, pause: int) -> None:
        self.policy.pause = pause

    def allot(self, step: BudgetStep) -> list[int]:
        limits = list(step.limits)
        with _reading("budget", f"allot with the limits {limits} in stage {step.stage}", step.batch):
            lengths = self.policy.allot(step)
        return self._decided("allot", lengths, limits)

    def goes_on(self, step: BudgetStep, newest: Seq[Seq[DraftedNode]]) -> list[bool]:
        with _reading("budget", f"goes_on of {list(map(len, newest))} nodes in stage {step.stage}", step.batch):
            answers = [int(bool(answer)) for answer in self.policy.goes_on(step, newest)]
        return [answer > 0 for answer in self._decided("goes_on", answers, [1] * len(newest))]

    def trim(self, step: BudgetStep, draft: Draft) -> list[int]:
        limits = draft.lengths
        with _reading("budget", f"trim of a draft of {limits} tokens in stage {step.stage}", step.batch, draft):
            lengths = self.policy.trim(step, draft)
        return self._decided("trim", lengths, limits)

    def observe(self, outcome: Outcome, stats: StepStats) -> None:
        accepted = list(map(len, outcome.accepted))
        with _reading("budget", f"observe of {accepted} accepted tokens", outcome.batch, outcome.draft):
            self.policy.observe(outcome, stats)

    def release(self, request_ids: Iterable[str]) -> None:
        names = list(request_ids)
        with named("budget.raises", f"release of {names}"):
            self.policy.release(names)

    def _decided(self, method: str, lengths: Any, limits: list[int]) -> list[int]:
        """`lengths` as they are, if they are one number for each row, from 0 to its limit."""
        rule = f"budget.{method}"
        with named(rule, f"reading what {method} gave"):
            numbers = list(lengths)
            if len(numbers) != len(limits):
                broken(rule, f"{method} gave {numbers} for {len(limits)} rows; give one number for each")
            for length, limit in zip(numbers, limits, strict=True):
                if not isinstance(length, Integral) or isinstance(length, bool):
                    broken(rule, f"{method} gave {length!r} among {numbers}; give whole numbers")
                if not 0 <= int(length) <= limit:
                    broken(
                        rule, f"{method} gave {numbers}, and the limits are {limits}; give 0 to its limit for each row"
                    )
        self.decisions.append((method, tuple(map(int, numbers))))
        return numbers


class WatchedBackend(AttentionBackend):
    """Passes every call on to another backend, and names what one breaks."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.takes_trees, self.takes_sinks = backend.takes_trees, backend.takes_sinks

    def unsupported(self, spec: KVCacheSpec) -> list[str]:
        with named("backend.unsupported", "unsupported"):
            reasons = self.backend.unsupported(spec)
        if not isinstance(reasons, list) or not all(isinstance(reason, str) and reason for reason in reasons):
            broken("backend.unsupported", f"unsupported returned {reasons!r}; give a list of sentences or an empty one")
        return ["it computes no attention sinks"] if spec.has_sinks and not self.takes_sinks else reasons

    def allocate(self, spec: KVCacheSpec) -> None:
        before = self.unsupported(spec)
        with named("backend.raises", f"allocate for {spec}"):
            self.backend.allocate(spec)
        if (after := self.unsupported(spec)) != before:
            broken("backend.unsupported", f"unsupported said {before}, and after allocate {after}")

    def fits(self, kv_lens: Mapping[str, int]) -> bool:
        with named("backend.fits", f"fits of {dict(kv_lens)}"):
            return self.backend.fits(kv_lens)

    def plan(self, packed: PackedInputs) -> StepPlan:
        with named("backend.raises", f"plan of {packed}"):
            plan = self.backend.plan(packed)
        try:
            check_plan(plan, packed)
        except AssertionError as error:
            raise BrokenRule("backend.plan", str(error)) from error
        return plan

    def forward(
        self, plan: StepPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        expected = (len(query), query.shape[1], value.shape[2])
        with named("backend.raises", f"forward of layer {layer}"):
            out = self.backend.forward(plan, layer, query, key, value)
        if not isinstance(out, torch.Tensor) or tuple(out.shape) != expected:
            shape = list(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
            broken("backend.output", f"forward of layer {layer} returned {shape}; give {list(expected)}")
        if not bool(out.isfinite().all()):
            broken("backend.output", f"forward of layer {layer} returned values that are not finite")
        return out

    def commit(self, kept: Kept) -> None:
        with named("backend.raises", f"commit of {kept}"):
            self.backend.commit(kept)
        lost = self.kv_usage.padding
        if not isinstance(lost, int) or lost < 0:
            broken("backend.commit", f"kv_usage.padding is {lost!r} after commit; give a whole number, 0 or more")

    def release(self, request_ids: Iterable[str]) -> None:
        names = list(request_ids)
        with named("backend.release", f"release of {names}"):
            self.backend.release(names)

    @property
    def kv_usage(self) -> KVUsage:
        with named("backend.memory", "kv_usage"):
            return self.backend.kv_usage


def places_of(plan: StepPlan, packed: PackedInputs) -> list[int]:
    """For each packed token its index in the flattened input."""
    indices = torch.arange(plan.input_ids.numel(), device=plan.input_ids.device)
    places: list[int] = plan.packed(indices, packed.num_tokens).tolist()
    return places


def check_plan(plan: StepPlan, packed: PackedInputs) -> None:
    """Check what the model is fed."""
    assert plan.input_ids.shape == plan.position_ids.shape
    rows, columns = plan.input_ids.shape
    pairs = list(zip(packed.input_ids.tolist(), packed.position_ids.tolist(), strict=True))
    fed = list(zip(plan.input_ids.flatten().tolist(), plan.position_ids.flatten().tolist(), strict=True))
    assert min(token for token, _ in fed) >= 0, "padding must be a token of the vocabulary"
    places = places_of(plan, packed)
    indexed = [fed[slot] for slot in places]
    assert indexed == pairs, f"tokens {pairs} at their positions are not where token_index finds {indexed}"
    keep = plan.logits_to_keep.tolist()
    projected = [row * columns + column for row in range(rows) for column in keep]
    chosen = slice(None) if plan.logit_index is None else plan.logit_index
    index = range(len(projected))[chosen] if isinstance(chosen, slice) else chosen.tolist()
    tokens = packed.logit_rows.tolist()
    assert len(index) == len(tokens), f"{len(index)} rows of logits for {len(tokens)} tokens"
    for token, row in zip(tokens, index, strict=True):
        assert projected[row] == places[token], f"the logits of token {token} are taken from {fed[projected[row]]}"
