"""A state machine that drives an engine through random arrivals, chunks, preemptions and budgets, beside greedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from emssd_testing.models import tiny_model
from emssd_testing.oracle import DenseBackend, References
from emssd_testing.strategies import policies
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from emssd.attention import AttentionBackend
from emssd.decoding.engine import Engine
from emssd.decoding.outcome import StepTimer
from emssd.decoding.scheduler import ContinuousScheduler, Fits, Schedule
from emssd.drafting import BudgetPolicy, Drafter, StepStats
from emssd.errors import PromptError
from emssd.model import CausalLMRunner, TargetModel
from emssd.sequences import FinishReason, Request, Row
from tests.support.strategies import drafters_with_eos

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["EngineMachine"]


class EngineMachine(RuleBasedStateMachine):
    """Random arrivals and steps: finished rows equal their greedy references exactly, and the engine keeps its limits.

    Test a drafter, a backend or a budget policy of your own by overriding what makes it, and run the machine::

        class MyMachine(EngineMachine):
            def drafters(self):
                return st.builds(MyDrafter)

        TestMyDrafter = MyMachine.TestCase

    Attributes:
        max_prompt_tokens, max_new_tokens: of the largest request; the model must be as long as both.
        max_kv_tokens: limits of KV are drawn up to here, and small ones make preemption frequent.
        crowded: every run begins with more prompts than are admitted together, not just some. In the simplest there is
            so little room that prompts are computed in pieces and rows preempted.
        prefix_caching: whether rows share the KV of what they share.
        num_preempted, num_pieces: rows preempted, and pieces of prompts, in all runs;
            `tests.support.preemption.run_with_preemption` sees to it that they occur.
    """

    max_prompt_tokens = 30
    max_new_tokens = 20
    max_kv_tokens = 64
    crowded: ClassVar[bool] = False
    prefix_caching: ClassVar[bool] = False
    num_preempted: ClassVar[int] = 0
    num_pieces: ClassVar[int] = 0
    num_adopted: ClassVar[int] = 0

    @classmethod
    def make_model(cls) -> PreTrainedModel:
        """The target, made once. In float64 no rounding decides which token is the likeliest."""
        return tiny_model("llama", vocab_size=11, max_model_len=64)

    @classmethod
    @cache
    def references(cls) -> References:
        """The target, and what it generates."""
        return References(TargetModel(cls.make_model()), cls.max_new_tokens)

    def make_backend(self, page_size: int) -> AttentionBackend:
        """A backend that is not allocated yet; `page_size` is what a paged one should take."""
        return DenseBackend()

    def drafters(self) -> st.SearchStrategy[Drafter | Seq[Drafter]]:
        """The drafters to run with: single ones, or several that are asked in turn."""
        references, with_trees = self.references(), self.make_backend(1).takes_trees
        one = drafters_with_eos(references.target.vocab_size, references, eos_token_ids=[1], with_trees=with_trees)
        return one | st.lists(one, min_size=2, max_size=3) if with_trees else one

    def policies(self) -> st.SearchStrategy[BudgetPolicy]:
        """The budget policies to run with."""
        return policies()

    @initialize(
        data=st.data(),
        batch_size=st.sampled_from([4, 1, 2, 3, 5]),
        max_step_tokens=st.sampled_from([20, 64, 8, 5, 3, 2, 1]),
        page_size=st.sampled_from([1, 3, 16]),
        headroom=st.sampled_from([0, 0, 2, 8, None]),
    )
    def begin(
        self, data: st.DataObject, batch_size: int, max_step_tokens: int, page_size: int, headroom: int | None
    ) -> None:
        """An idle engine with options of any kind; no `headroom` stands for admission by the worst case."""
        target, drafter = self.references().target, data.draw(self.drafters(), label="drafter")
        limits = [self.max_kv_tokens * tenths // 10 for tenths in range(6, 11)]
        max_tokens = data.draw(st.sampled_from([*limits, None]), label="max_tokens")
        trees = any(single.drafts_trees for single in ([drafter] if isinstance(drafter, Drafter) else drafter))
        spec = dataclasses.replace(
            target.kv_cache_spec(batch_size),
            max_tokens=max_tokens,
            continuous=True,
            trees=trees,
            prefix_caching=self.prefix_caching,
        )
        backend = self.make_backend(page_size)
        assert not backend.unsupported(spec), backend.unsupported(spec)
        backend.allocate(spec)
        self._max_bytes = None if max_tokens is None else max_tokens * spec.bytes_per_token()
        self._steps = list[StepStats]()
        self._scheduler = _WatchedScheduler(
            batch_size, max_step_tokens, worst_case=headroom is None, headroom=headroom or 0
        )
        self.engine = Engine(
            CausalLMRunner(target, backend),
            drafter,
            scheduler=self._scheduler,
            budget=data.draw(self.policies(), label="policy"),
            on_drafter_error="fail",
            make_timer=lambda: _Clock(self._steps),
        )
        self._never_preempts = headroom is None
        self._open: dict[str, Request] = {}  # in order of arrival
        self._num_requests = 0
        crowd = st.lists(st.integers(self.max_prompt_tokens // 2, self.max_prompt_tokens), min_size=4, max_size=8)
        first = data.draw(crowd if self.crowded else st.just([]) | crowd, label="prompt tokens of a crowd")
        for number, length in enumerate(first):  # of texts that do not begin alike, so that they share no room
            self._arrive(data, [length], seed=number % 4, eos=frozenset())

    @rule(data=st.data(), seed=st.integers(0, 3), eos=st.frozensets(st.integers(0, 10), max_size=1))
    def arrive(self, data: st.DataObject, seed: int, eos: frozenset[int]) -> None:
        """Requests, whose prompts begin alike; one that could not run even alone is refused."""
        longest = self.max_prompt_tokens
        lengths = st.lists(st.integers(1, min(6, longest)) | st.integers(1, longest), min_size=1, max_size=4)
        self._arrive(data, data.draw(lengths, label="prompt tokens"), seed, eos)

    @rule(num_steps=st.integers(1, 12))
    def steps(self, num_steps: int) -> None:
        """Steps, as long as there is work."""
        for _ in range(num_steps):
            if self._open:
                self._step()

    @rule(really=st.sampled_from([False] * 7 + [True]))
    def abandon(self, really: bool) -> None:
        """Everything is given up, as when a stream is closed early."""
        if really:
            self.engine.clear()  # as `Engine.run` does when it is closed
            self._open = {}

    @invariant()
    def memory(self) -> None:
        """Never more KV than the limit, and none for nobody."""
        usage, limit = self.engine.runner.usage, self._max_bytes
        assert limit is None or max(usage.held, usage.peak_held, usage.peak_pool) <= limit, f"{usage} of {limit} bytes"
        assert self._open or not usage.held, f"{usage.held} bytes are held for no request"
        assert self.engine.scheduler.has_work == bool(self._open)

    def teardown(self) -> None:
        """When arrivals stop, everything ends: each step brings the earliest row forward."""
        if hasattr(self, "_open"):
            for _ in range(sum(len(request.prompt_ids) + request.max_new_tokens for request in self._open.values())):
                self.steps(1)
            assert not self._open, f"{list(self._open)} do not end"
            self.memory()

    def _arrive(self, data: st.DataObject, lengths: list[int], seed: int, eos: frozenset[int]) -> None:
        generator = torch.Generator().manual_seed(seed)
        vocab_size, longest = self.references().target.vocab_size, self.max_prompt_tokens
        text = torch.randint(0, vocab_size, (longest,), generator=generator).tolist()
        for length in lengths:
            fewer = data.draw(st.just(0) | st.integers(0, self.max_new_tokens - 1), label="fewer new tokens")
            num_new = self.max_new_tokens - fewer
            self._num_requests += 1
            request = Request(f"r{self._num_requests}", tuple(text[:length]), num_new, eos)
            fits = self.engine.runner.fits({request.request_id: length + num_new})
            try:
                self.engine.add(request)
            except PromptError:
                assert not fits, f"{request} fits into the KV cache, and was refused"
            else:
                assert fits, f"{request} is larger than the KV cache, and was not refused"
                self._open[request.request_id] = request

    def _step(self) -> None:
        first = self._scheduler.rows[next(iter(self._open))]
        before = len(first.tokens), first.num_cached
        cached = {row.request_id: row.num_cached for row in self._scheduler.rows.values()}
        finished = self.engine.step()
        schedule, stats = self._scheduler.schedules[-1], self._steps[-1]
        type(self).num_preempted += stats.num_preempted
        type(self).num_pieces += len(schedule.prefills)
        type(self).num_adopted += stats.num_adopted_tokens
        assert self.prefix_caching or not stats.num_adopted_tokens, "rows share KV that were not asked to"
        for row in finished:
            request = self._open.pop(row.request_id)  # a KeyError would mean that it finished twice
            expected = self.references().of(request)
            assert tuple(row.output_ids) == expected, f"{request} got {row.output_ids} in the place of {expected}"
            by_eos = expected[-1] in request.eos_token_ids
            assert row.finish_reason is (FinishReason.EOS if by_eos else FinishReason.LENGTH)
        assert (len(first.tokens), first.num_cached) > before, f"the earliest row stands still: {first}"
        assert stats.num_rows == len(schedule.batch) + len(schedule.prefills) <= self.engine.batch_size
        assert stats.num_preempted == len(schedule.preempted)
        assert not (self._never_preempts and schedule.preempted), "the worst case was admitted, and a row preempted"
        for row in schedule.batch:
            assert row.request_id not in self._open or row.num_cached == len(row.tokens) - 1, f"after its step: {row}"
        for piece in schedule.prefills:
            row = piece.row
            more = row.num_cached - cached[row.request_id] - piece.num_tokens
            assert 0 <= more <= stats.num_adopted_tokens, f"after a piece of its prompt: {row}"
        for row in schedule.preempted:
            assert row.num_cached == 0, f"preempted: {row}"


class _WatchedScheduler(ContinuousScheduler):
    """Remembers the sequences that came, and who ran in each step."""

    def __init__(self, batch_size: int, max_step_tokens: int, *, worst_case: bool, headroom: int) -> None:
        super().__init__(batch_size, max_step_tokens, worst_case=worst_case, headroom=headroom)
        self.rows: dict[str, Row] = {}
        self.schedules: list[Schedule] = []

    def add(self, sequence: Row) -> None:
        self.rows[sequence.request_id] = sequence
        super().add(sequence)

    def select(self, fits: Fits, num_speculative_tokens: int) -> Schedule:
        self.schedules.append(super().select(fits, num_speculative_tokens))
        return self.schedules[-1]


class _Clock(StepTimer):
    """Made up from numbers of tokens, so that a policy does the same whenever a run is repeated; it keeps `steps`."""

    def __init__(self, steps: list[StepStats]) -> None:
        super().__init__()
        self._steps = steps

    def timed(self, stats: StepStats) -> StepStats:
        forward, draft = 1.0 + 0.2 * max(0, stats.num_tokens - 6), 0.1 * sum(stats.drafted)
        seconds = dict.fromkeys(self.seconds, 0.0) | {"forward": forward, "draft": draft}
        stages = tuple(dataclasses.replace(stage, seconds=0.1 * sum(stage.budget)) for stage in stats.stages)
        self._steps.append(dataclasses.replace(stats, seconds=seconds, stages=stages))
        return self._steps[-1]
