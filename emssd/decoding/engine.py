"""The decode loop: `Engine.step` is one step of lossless batched speculative decoding, on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing, nullcontext, suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

import torch

from emssd.attention import Kept, PackedInputs
from emssd.data.prompts import check_limit, check_prompt, encode_prompts, limit_per_prompt
from emssd.decoding.assembly import make_parts, parts_of_model, parts_of_path
from emssd.decoding.choosing import states_in
from emssd.decoding.logprobs import add_logprobs
from emssd.decoding.options import DEFAULT_DRAFTER, EngineOptions
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
from emssd.errors import ConfigError, EmssdError, OutOfMemoryError, PluginError, PromptError
from emssd.hooks.registry import Registry, verification_rule
from emssd.metrics.stats import RunReport
from emssd.model import CausalLMRunner, ModelOutput, ModelRunner, TargetModel, load_model
from emssd.model.load.loading import LoadModel
from emssd.sampling import SamplingParams
from emssd.sampling.matching import Grammars
from emssd.sequences import Generation, Request, Row, StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Engine"]


class Engine:
    """Lossless speculative decoding of a batch: whatever drafts, the tokens are those of the target alone.

    Args:
        runner: the target with its KV cache.
        drafter: the drafter, or several in turn, each for the rows for which the earlier ones found no draft.
        tokenizer: a Hugging Face tokenizer; without one, prompts are token ids and generations have no text.
        batch_size: rows decoded together.
        eos_token_ids: what ends a sequence.
        scheduler: who runs when; continuous batches of `batch_size` by default.
        budget: how much each row drafts; as much as the drafter wants by default.
        drafter_name, budget_name: how errors call the drafter and the budget policy.
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
        drafter_name: str | None = None,
        budget_name: str | None = None,
        on_drafter_error: str = "disable",
        make_timer: Callable[[], StepTimer] = StepTimer,
        force_tokens: bool = True,
    ) -> None:
        self.runner = runner
        drafters = [drafter] if isinstance(drafter, Drafter) else drafter
        checked = [
            each
            if isinstance(each, CheckedDrafter)
            else CheckedDrafter(each, drafter_name, runner.vocab_size, on_error=on_drafter_error)
            for each in drafters
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

    @classmethod
    def from_pretrained(
        cls,
        path: str = "demo",
        *,
        drafter: Any = DEFAULT_DRAFTER,
        backend: Any = "ragged",
        budget: Any = "adaptive",
        **options: Any,
    ) -> Self:
        """Load a model and make an engine for it.

        Args:
            path: local folder, hub id, or ``demo`` for the embedded model.
            drafter: a name such as ``"llma"``, a plugin's config such as ``LLMAConfig(copy_length=10)``, a `Drafter`,
                or a list of them, asked in turn.
            backend: a name or a plugin's config.
            budget: a name, a plugin's config, or a `BudgetPolicy`.
            options: fields of `ModelOptions`, such as ``dtype="float32"``, and of `EngineOptions`, such as
                ``batch_size=16``. With ``compile="auto"``, `generate` and `stream` also compile where a call is long
                enough. With ``tensor_parallel=True``, each process that torchrun started must make the same calls, with
                the same prompts; each gets the same tokens.
        """
        return cls(**parts_of_path({"path": path} | options, drafter, backend, budget))

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        drafter: Any = DEFAULT_DRAFTER,
        backend: Any = "ragged",
        budget: Any = "adaptive",
        frozen: bool = False,
        **options: Any,
    ) -> Self:
        """Make an engine for a model that is already loaded, and in evaluation mode; see `from_pretrained`.

        The engine borrows the model: what it computes from the weights ends with each run, and a compiled program is
        made again. So you may train or edit the model between two runs.

        Args:
            frozen: you promise not to, so the engine keeps what it computes, as if it had loaded the model. It raises
                `UnsupportedModelError` where it sees a change; after `Engine.refresh`, it uses the model as it is then.
            options: fields of `EngineOptions`; and of `ModelOptions` ``max_model_len``, ``compile``, which is false by
                default, ``batch_invariant`` and ``trust_remote_code``.
        """
        return cls(**parts_of_model(model, tokenizer, options, drafter, backend, budget, frozen=frozen))

    @classmethod
    def assemble(
        cls,
        target: TargetModel,
        tokenizer: Any,
        *,
        drafter: Any,
        backend: Any,
        budget: Any = "adaptive",
        options: EngineOptions | None = None,
        registry: Registry | None = None,
        eos: Iterable[int] | None = None,
        load: LoadModel = load_model,
    ) -> Self:
        """Make an engine for `target`, which is ready to run.

        Args:
            drafter, backend, budget: as in `from_pretrained`.
            eos: what ends a sequence; what the model says by default.
            load: loads draft models.
        """
        options, registry = options or EngineOptions(), registry or Registry()
        parts = make_parts(target, tokenizer, drafter, backend, budget, options, registry, eos=eos, load=load)
        return cls(**parts)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler. One that is set later must have no rows yet."""
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Scheduler) -> None:
        scheduler.prefixes, scheduler.trees = self.prefixes, self.drafting.drafts_trees
        self._scheduler = scheduler

    @property
    def target(self) -> TargetModel:
        """The model that decodes, where the runner has one in this process."""
        assert isinstance(self.runner, CausalLMRunner), f"a {type(self.runner).__name__} has no model in this process"
        return self.runner.model

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
            packed = pack(
                schedule.batch.rows,
                known := draft.within(self.runner.vocab_size),
                schedule.prefills,
                greedy=schedule.batch.is_plain,
            )
            timer.lap("plan")
            with self.grammars.beside(states_in(schedule.batch.rows, known)) if self._has_grammars else nullcontext():
                output = self.runner.run(packed)
            timer.lap("forward", plan=output.plan_seconds, mask=self.grammars.waited)
            verified = self._verify(schedule.batch.rows, draft, output)
            timer.lap("verify")
            self._advance(schedule, verified)
            outcome = outcome_of(schedule.batch, draft, verified, packed, output)
            self._conclude(schedule, outcome, self._stats(schedule, packed, output, outcome), timer)
        return self._handed_over()

    def stream(
        self,
        prompts: Iterable[str | Seq[int]],
        max_new_tokens: int | Seq[int] = 128,
        *,
        stop: Seq[str] = (),
        ignore_eos: bool = False,
        sampling: SamplingParams | None = None,
    ) -> Iterator[Generation]:
        """Decode `prompts` and yield each `Generation` as its row finishes, in finish order.

        Args:
            prompts: texts, or token ids of prompts already encoded.
            max_new_tokens: upper limit of new tokens, EOS included; one for all prompts, or one for each.
            stop: texts that end a sequence with the token that completes one; see `emssd.sequences.StopStrings`.
            ignore_eos: let only limits and stop strings end a sequence (for benchmarks).
            sampling: how tokens are chosen; greedily by default. The text of a prompt is a function of the model, the
                prompt, its place among `prompts`, and `sampling`; if ``n`` is above 1, also of the sample.

        Raises:
            ConfigError: a limit below one, not one limit per prompt, or stop strings that cannot be.
            PromptError: an empty or too long prompt, before anything runs.
        """
        encoded = encode_prompts(prompts, self.tokenizer)
        limits = limit_per_prompt(max_new_tokens, len(encoded))
        stops = StopStrings(stop, self.tokenizer) if stop else None
        eos = frozenset[int]() if ignore_eos else self.eos_token_ids
        pairs = enumerate(zip(encoded, limits, strict=True))
        if limits and isinstance(self.runner, CausalLMRunner):
            most = [min(limit, self.runner.max_model_len) for limit in limits]
            num_tokens = sum(most) * (1 if sampling is None else sampling.n)
            self.target.compile_if_it_pays(max(*most, num_tokens // self.batch_size))
        return self.run([Request(str(i), tuple(ids), limit, eos, stops, sampling) for i, (ids, limit) in pairs])

    def generate(
        self,
        prompts: Iterable[str | Seq[int]],
        max_new_tokens: int | Seq[int] = 128,
        *,
        stop: Seq[str] = (),
        ignore_eos: bool = False,
        sampling: SamplingParams | None = None,
    ) -> list[Generation]:
        """Like `stream`, but returns all generations in one list, in the order of the prompts.

        With ``sampling.n`` above 1, the samples of a prompt follow one another: sample ``s`` of prompt ``i`` stands at
        ``i * n + s``.

        An `EmssdError` raised on the way carries what was finished before it in its attribute ``finished``.
        """
        done: dict[tuple[int, int], Generation] = {}
        try:
            for generation in self.stream(prompts, max_new_tokens, stop=stop, ignore_eos=ignore_eos, sampling=sampling):
                done[int(generation.request_id), generation.sample] = generation
        except EmssdError as error:
            error.finished = list(done.values())
            raise
        return [done[place] for place in sorted(done)]

    def run(self, requests: Iterable[Request], *, watch: Callable[[Row], None] | None = None) -> Iterator[Generation]:
        """Decode requests, each for all of its samples; yields in finish order. Closing the iterator frees what runs.

        Args:
            watch: gets each row after each step, to be read only: a text is there before its row has finished.

        Raises:
            ConfigError: two requests have the same id, or the engine is still busy with other requests.
            PromptError: a request that the KV cache could not hold even alone, before anything runs.
        """
        return _one_by_one(self.steps(requests, watch=watch))

    def steps(
        self, requests: Iterable[Request], *, watch: Callable[[Row], None] | None = None
    ) -> Generator[list[Generation], None, None]:
        """As `run`, but yields after each step, with all rows that it finished."""
        requests = [sample for request in requests for sample in request.samples()]
        counts = Counter(request.request_id for request in requests)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ConfigError(f"two requests have the same request_id {twice[0]!r}; make them unique")
        return self._decode([self.row(request) for request in requests], watch)

    def _decode(self, rows: Seq[Row], watch: Callable[[Row], None] | None) -> Generator[list[Generation], None, None]:
        if self.scheduler.has_work:
            raise ConfigError("this engine is still decoding; use up or close the iterator that it gave before")
        self.report = RunReport()
        for row in rows:
            self.scheduler.add(row)
        try:
            while self.scheduler.has_work:
                finished = self._step_in_memory()
                for row in rows if watch is not None else ():
                    watch(row)
                yield [Generation.of(row, self.tokenizer) for row in finished]
        except EmssdError:
            yield [Generation.of(row, self.tokenizer) for row in self._handed_over()]  # of a step that counts
            raise
        finally:
            with suppress(PluginError):  # what ended the run matters more than a drafter that cannot forget
                self.clear()

    def add(self, request: Request) -> None:
        """Queue all samples of one more request, also between two calls of `step`; for those who drive the loop.

        Raises:
            ConfigError: a request of the same id waits or runs.
            PromptError: see `row`.
        """
        samples = request.samples()
        for each in samples:
            if self.scheduler.knows(each.request_id):
                raise ConfigError(f"request {each.request_id!r} is there already; make request ids unique")
        for row in [self.row(each) for each in samples]:
            self.scheduler.add(row)

    def clear(self, request_ids: Collection[str] | None = None) -> None:
        """Drop these requests, or all that wait or run. Later ones may still begin with KV of theirs."""
        gone = request_ids
        self._finished = [row for row in self._finished if gone is not None and row.request_id not in gone]
        dropped = self.scheduler.clear(gone)
        self._in_run &= self.scheduler.has_work
        self._free(dropped)

    def refresh(self) -> None:
        """Take the model as it is now. An engine that owns its model keeps what it computed from the weights.

        Raises:
            ConfigError: the engine is decoding.
            UnsupportedModelError: its KV cache cannot serve the model any more.
        """
        if self.scheduler.has_work:
            raise ConfigError("this engine is decoding; refresh it when it has no more work")
        self.target.renew()

    def row(self, request: Request) -> Row:
        """The row of `request` as it will begin.

        Raises:
            PromptError: its prompt cannot be used, or the KV cache could not hold it even alone.
            ConfigError: nothing may be generated, or `Request.sampling` names tokens outside the vocabulary.
        """
        num_prompt, name = len(request.prompt_ids), request.request_id
        check_prompt(request.prompt_ids, self.runner.max_model_len, self.runner.vocab_size, name)
        check_limit(request.max_new_tokens, f"request {name!r} has max_new_tokens")
        if request.sampling is not None:
            request.sampling.check_vocabulary(self.runner.vocab_size)
            if request.sampling.is_residual:
                self.rule = verification_rule(request.sampling.method.value)
        row = Row(request, max_length=min(num_prompt + request.max_new_tokens, self.runner.max_model_len))
        if request.sampling is not None and request.sampling.grammar is not None:
            self._has_grammars = True
            row.grammar = self.grammars.begin(request.sampling.grammar, request.eos_token_ids or self.eos_token_ids)
            if self.force_tokens:
                self.drafting.force_tokens(self.runner.vocab_size)
        if not self.runner.fits({request.request_id: row.max_length}):
            raise PromptError(
                f"request {request.request_id} takes up to {row.max_length} tokens of KV cache, {num_prompt} of "
                f"them for its prompt, and there is no room for so many; raise kv_memory, or lower max_new_tokens"
            )
        return row

    def _step_in_memory(self) -> list[Row]:
        """`step`, with a word on what to lower when the device has no room left, and no silent end of the process."""
        try:
            return self.step()
        except torch.OutOfMemoryError as error:
            held = self.runner.usage
            raise OutOfMemoryError(
                f"{self.runner.device} is out of memory in a step of up to {self.batch_size} rows, with "
                f"{held.peak_pool / 2**30:.2f} GiB in the KV cache; lower kv_memory, batch_size or max_step_tokens. "
                f"Rows that were finished are kept"
            ) from error
        except SystemExit as error:
            raise PluginError(f"the model or the backend called sys.exit({error.code!r}) in a step") from error

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
            self.drafting.check_ids([each.drafted for each in verified])
        if any(map(attrgetter("request.sampling"), rows)):
            add_logprobs(output.logits, draft, verified)
        return verified

    def _advance(self, schedule: Schedule, verified: Seq[Verified]) -> None:
        """Advance every row by its own acceptance, or none."""
        rows, pieces = schedule.batch.rows, schedule.prefills
        prompts = [row for row in rows if len(row.tokens) > row.num_cached + 1] + [piece.row for piece in pieces]
        taken = [each.row.taken(each.new_tokens) for each in verified]
        self.runner.commit(_kept(verified, pieces))
        for each, (tokens, reason) in zip(verified, taken, strict=True):
            each.row.advance(tokens, reason, len(each.drafted), len(each.accepted), each.logprobs)
        for piece in pieces:
            piece.row.num_cached += piece.num_tokens
        finished = [row for row in rows if row.finish_reason is not None]
        self._scheduler.retire(finished)
        self._finished += finished
        if prompts:
            self.prefixes.publish(prompts)
        self._in_run = self._scheduler.has_work

    def _stats(self, schedule: Schedule, packed: PackedInputs, output: ModelOutput, outcome: Outcome) -> StepStats:
        usage, num_waiting = self.runner.usage, self._scheduler.num_waiting
        return step_stats(schedule, packed, output, outcome, usage, self.drafting.stats, num_waiting)

    def _conclude(self, schedule: Schedule, outcome: Outcome, stats: StepStats, timer: StepTimer) -> None:
        """Notify plugins of a step, free the rows that it finished, and count it: all, even if a plugin fails."""
        finished = [row for row in schedule.batch.rows if row.finish_reason is not None]
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


def _one_by_one(steps: Generator[list[Generation], None, None]) -> Iterator[Generation]:
    with closing(steps):
        for finished in steps:
            yield from finished


def _kept(verified: Seq[Verified], pieces: Seq[Prefill]) -> Kept:
    """The KV that stays of rows, with their accepted nodes, and of pieces of prompts; nodes that lie together stay."""
    names, kv_lens, sources = list[str](), list[int](), list[tuple[int, ...]]()
    for each in verified:
        num_tokens, nodes = len(each.row.tokens), each.accepted
        names.append(each.row.request_id)
        kv_lens.append(num_tokens + len(nodes))
        is_beginning = not nodes or nodes[-1] == len(nodes) - 1
        sources.append(() if is_beginning else tuple(num_tokens + node for node in nodes))
    for piece in pieces:
        names.append(piece.row.request_id)
        kv_lens.append(piece.row.num_cached + piece.num_tokens)
        sources.append(())
    return Kept(tuple(names), tuple(kv_lens), tuple(sources) if any(sources) else ())
