"""The decode loop: `DecodeLoop.step` is one step of lossless batched speculative decoding, on one screen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from contextlib import ExitStack, nullcontext
from operator import attrgetter
from typing import Any

import torch

from emssd.attention import Kept, PackedInputs
from emssd.decoding.choosing import states_in
from emssd.decoding.logprobs import add_logprobs
from emssd.decoding.outcome import StepTimer, outcome_of, step_stats
from emssd.decoding.packing import pack
from emssd.decoding.prefixes import Prefixes
from emssd.decoding.scheduler import ContinuousScheduler, Prefill, Schedule, Scheduler
from emssd.decoding.verify import SharedNoise, best_tokens, verify
from emssd.drafting import BudgetPolicy, Draft, Drafter, Outcome, StepStats
from emssd.drafting.budget import FixedBudget
from emssd.drafting.checked import CheckedDrafter
from emssd.drafting.rule import VerificationRule, Verified
from emssd.drafting.stages import DraftStages
from emssd.metrics.stats import RunReport
from emssd.model import ModelOutput, ModelRunner
from emssd.sampling.matching import Grammars
from emssd.sequences import Row

__all__ = ["DecodeLoop"]


class DecodeLoop:
    """Decodes rows, a batch at a time: whatever drafts, the tokens are those of the target alone.

    Args:
        runner: the target with its KV cache.
        drafter: the drafter, or several in turn, each for the rows for which the earlier ones found no draft.
        tokenizer: a Hugging Face tokenizer; without one, prompts are token ids and generations have no text.
        batch_size: rows decoded together.
        eos_token_ids: what ends a sequence.
        scheduler: who runs when; continuous batches of `batch_size` by default.
        budget: how much each row drafts; as much as the drafter wants by default.
        budget_name: how errors call the budget policy.
        on_drafter_error: ``"disable"`` goes on without a drafter that fails, with a warning; ``"fail"`` raises.
        make_timer: makes what times a step.
        force_tokens: draft the tokens to which a grammar leaves no choice, in front of the drafters.
    """

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | Seq[Drafter],
        *,
        tokenizer: Any = None,
        batch_size: int = 8,
        eos_token_ids: Iterable[int] = (),
        scheduler: Scheduler | None = None,
        budget: BudgetPolicy | None = None,
        budget_name: str | None = None,
        on_drafter_error: str = "disable",
        make_timer: Callable[[], StepTimer] = StepTimer,
        force_tokens: bool = True,
    ) -> None:
        self.runner = runner
        checked = [
            one
            if isinstance(one, CheckedDrafter)
            else CheckedDrafter(one, None, runner.vocab_size, on_error=on_drafter_error)
            for one in ([drafter] if isinstance(drafter, Drafter) else drafter)
        ]
        self.drafting = DraftStages(checked, budget or FixedBudget(), budget_name)
        runner.take_hidden(self.drafting.hidden_layers)
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        # Adopted tokens have no hidden states, so nothing is shared if a drafter wants some.
        self.prefixes = Prefixes(None if self.drafting.hidden_layers else runner)
        self.scheduler = scheduler or ContinuousScheduler(batch_size)
        self.batch_size = self.scheduler.batch_size
        self.report = RunReport()
        self.rule: VerificationRule = SharedNoise()
        self.grammars, self.force_tokens = Grammars(tokenizer, runner.vocab_size), force_tokens
        self._make_timer = make_timer
        self._finished: list[Row] = []  # to be returned by `step`
        self._in_run = self._has_grammars = False

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler. One that is set later must have no rows yet."""
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Scheduler) -> None:
        scheduler.prefixes, scheduler.trees = self.prefixes, self.drafting.drafts_trees
        self._scheduler = scheduler

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to decode, or to return."""
        return self.scheduler.has_work or bool(self._finished)

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Draft, verify and commit once for the rows that the scheduler selects. Returns those that finished.

        All or nothing: after an exception, the step counts in full or not at all. If a plugin fails after the tokens
        are chosen, the step counts, and the next call returns the rows that it finished.
        """
        if self._scheduler.has_work:
            timer, schedule = self._make_timer(), self._schedule()
            draft = self.drafting.propose(schedule.batch, schedule.limits, schedule.num_prefill_tokens)
            timer.lap("schedule", draft=self.drafting.seconds)
            batch, drafted = schedule.batch, draft.within(self.runner.vocab_size)
            packed = pack(batch.rows, drafted, schedule.prefills, greedy=batch.is_plain)
            timer.lap("plan")
            with self.grammars.beside(states_in(batch.rows, drafted)) if self._has_grammars else nullcontext():
                output = self.runner.run(packed)
            timer.lap("forward", plan=output.plan_seconds, mask=self.grammars.waited)
            verified = self._verify(batch.rows, draft, output)
            timer.lap("verify")
            self._advance(schedule, verified)
            self._conclude(schedule, packed, output, outcome_of(batch, draft, verified, packed, output), timer)
        return self._handed_over()

    def clear(self, request_ids: Collection[str] | None = None) -> None:
        """Drop these requests, or all that wait or run. Later ones may still begin with KV of theirs."""
        kept = self._finished if request_ids is not None else []
        self._finished = [row for row in kept if row.request_id not in (request_ids or ())]
        dropped = self.scheduler.clear(request_ids)
        self._in_run &= self.scheduler.has_work
        self._free(dropped)

    def _schedule(self) -> Schedule:
        """The schedule of this step. Preempted rows give their KV back."""
        if not self._in_run:
            self.runner.begin()
        self._in_run = True
        schedule = self._scheduler.select(self.runner.fits, self.drafting.num_speculative_tokens)
        if schedule.preempted:
            self._free(schedule.preempted)
        return schedule

    def _verify(self, rows: Seq[Row], draft: Draft, output: ModelOutput) -> list[Verified]:
        """Verify the draft of each row; the host has waited for the device once, unless a rule has to do so."""
        best = best_tokens(output.logits, self.drafting.num_candidates)
        if output.greedy is None:
            verified = self.rule.verify(output.logits, rows, draft, best)
        else:
            verified = verify(output.greedy, rows, draft, best)
        if not draft.on_host:
            self.drafting.check_ids([result.drafted for result in verified])
        if any(map(attrgetter("request.sampling"), rows)):
            add_logprobs(output.logits, draft, verified)
        return verified

    def _advance(self, schedule: Schedule, verified: Seq[Verified]) -> None:
        """Advance every row by its own acceptance, or none."""
        rows, pieces = schedule.batch.rows, schedule.prefills
        prompts = [row for row in rows if len(row.tokens) > row.num_cached + 1] + [piece.row for piece in pieces]
        taken = [result.row.taken(result.new_tokens) for result in verified]
        self.runner.commit(_kept(verified, pieces))
        for result, (tokens, reason) in zip(verified, taken, strict=True):
            result.row.advance(tokens, reason, len(result.drafted), len(result.accepted), result.logprobs)
        for piece in pieces:
            piece.row.num_cached += piece.num_tokens
        finished = [row for row in rows if row.finish_reason is not None]
        self._scheduler.retire(finished)
        self._finished += finished
        if prompts:
            self.prefixes.publish(prompts)
        self._in_run = self._scheduler.has_work

    def _conclude(
        self, schedule: Schedule, packed: PackedInputs, output: ModelOutput, outcome: Outcome, timer: StepTimer
    ) -> None:
        """Notify plugins of a step, free the rows that it finished, and count it: all, even if a plugin fails."""
        usage, num_waiting = self.runner.usage, self._scheduler.num_waiting
        stats = step_stats(schedule, packed, output, outcome, usage, self.drafting.stats, num_waiting)
        finished = [row for row in outcome.batch.rows if row.finish_reason is not None]
        timer.lap("other")
        with ExitStack() as always:  # the last line comes first
            always.callback(self._count, stats, timer)
            always.callback(self._free, finished)
            always.callback(self._learn, outcome, stats, timer)
            self.drafting.observe(outcome)

    def _learn(self, outcome: Outcome, stats: StepStats, timer: StepTimer) -> None:
        """Notify the budget policy of the step, which includes the time that drafters took to observe it."""
        timer.lap("draft")
        try:
            self.drafting.learn(outcome, timer.timed(stats))
        finally:
            timer.lap("schedule")

    def _count(self, stats: StepStats, timer: StepTimer) -> None:
        self.report.add(timer.timed(stats), self.batch_size)
        self.report.kv_usage = self.runner.usage

    def _handed_over(self) -> list[Row]:
        finished, self._finished = self._finished, []
        return finished

    @torch.inference_mode()  # an early close comes from outside of `step`, and a backend may write in place
    def _free(self, rows: Iterable[Row]) -> None:
        """Give back what backend and plugins hold of rows that ended, or were preempted and will come again."""
        if gone := list(rows):
            self.prefixes.publish(gone)
            for row in gone:
                row.num_cached = 0
            request_ids = [row.request_id for row in gone]
            self.runner.release(request_ids)
            self.drafting.release(request_ids)


def _kept(verified: Seq[Verified], pieces: Seq[Prefill]) -> Kept:
    """The KV that stays of rows, with their accepted nodes, and of pieces of prompts; nodes that lie together stay."""
    names, kv_lens, sources = [], [], []
    for result in verified:
        num_tokens, nodes = len(result.row.tokens), result.accepted
        names.append(result.row.request_id)
        kv_lens.append(num_tokens + len(nodes))
        is_beginning = not nodes or nodes[-1] == len(nodes) - 1
        sources.append(() if is_beginning else tuple(num_tokens + node for node in nodes))
    for piece in pieces:
        names.append(piece.row.request_id)
        kv_lens.append(piece.row.num_cached + piece.num_tokens)
        sources.append(())
    return Kept(tuple(names), tuple(kv_lens), tuple(sources) if any(sources) else ())
